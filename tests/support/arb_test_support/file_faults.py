"""File operations that fail: the n-th below a folder, with an error of the system.

Run something once to count its operations, then once for each of them::

    with FileFaults(folder) as counted:
        run()
    for number, operation in enumerate(counted.operations):
        with FileFaults(folder, errno.ENOSPC, number):
            run()
"""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from errno import EACCES, EIO, EMFILE, ENOSPC, EROFS, ESTALE
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from unittest.mock import patch

_CHANGES: Final = frozenset({"create", "rename", "unlink", "mkdir"})
_ALL: Final = _CHANGES | {"open", "write", "fsync"}
#: The operations that an error of the system can end. ``create`` opens a file for writing, and
#: ``open`` for reading.
ERRORS: Final[Mapping[int, frozenset[str]]] = {
    EIO: _ALL,
    ESTALE: _ALL,
    ENOSPC: frozenset({"create", "write", "fsync", "rename", "mkdir"}),
    EACCES: _CHANGES | {"open"},
    EROFS: _CHANGES,
    EMFILE: frozenset({"create", "open"}),
}
#: Errors that do not go away by themselves: each later operation fails too.
LASTING: Final = frozenset({ENOSPC, EROFS, EMFILE})


class FileFaults:
    """Counts the file operations below ``root`` within a ``with`` block, and has one fail.

    Operations of Python are counted, not those of libraries in C.

    Args:
        root: the folder.
        error: number of the error, a key of ``ERRORS``.
        number: which operation fails, from 0; None = none does.

    Attributes:
        operations: kind and path of each operation, in their order.
    """

    def __init__(self, root: Path, error: int = EIO, number: int | None = None) -> None:
        self.root = root.resolve()
        self.error = error
        self.number = number
        self.operations: list[tuple[str, Path]] = []
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        for module, name, replacement in (
            (builtins, "open", self._open(io.open)),
            (io, "open", self._open(io.open)),
            (os, "open", self._os_open(os.open)),
            (os, "fsync", self._fsync),
            (os, "rename", self._rename(os.rename)),
            (os, "replace", self._rename(os.replace)),
            (os, "unlink", self._one_path("unlink", os.unlink)),
            (os, "remove", self._one_path("unlink", os.remove)),
            (os, "rmdir", self._one_path("unlink", os.rmdir)),
            (os, "mkdir", self._one_path("mkdir", os.mkdir)),
        ):
            self._patches.enter_context(patch.object(module, name, replacement))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._patches.close()

    def attempt(self, operation: str, path: Path) -> None:
        """Count an operation.

        Raises:
            OSError: it is the one that fails, or follows it.
        """
        if not path.is_relative_to(self.root):
            return
        number = len(self.operations)
        self.operations.append((operation, path))
        if self.number is None or number < self.number or operation not in ERRORS[self.error]:
            return
        if number == self.number or self.error in LASTING:
            # The system does not name the file of a descriptor.
            named = () if operation in ("write", "fsync") else (str(path),)
            raise OSError(self.error, os.strerror(self.error), *named)

    def _open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def open_counted(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            path = _path_of(file)
            writes = not set(mode).isdisjoint("wax+")
            if not isinstance(file, int):
                self.attempt("create" if writes else "open", path)
            if not writes or not path.is_relative_to(self.root):
                return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
            raw = _CountedFile(file, mode.replace("b", ""), closefd, opener)
            raw.attempt_write = lambda: self.attempt("write", path)
            if buffering == 0:
                return raw
            binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            if "b" in mode:
                return binary
            return io.TextIOWrapper(binary, encoding, errors, newline, buffering == 1)

        return open_counted

    def _os_open(self, original: Callable[..., int]) -> Callable[..., int]:
        def open_counted(
            path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
        ) -> int:
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            self.attempt("create" if writes else "open", _path_of(path, dir_fd))
            return original(path, flags, mode, dir_fd=dir_fd)

        return open_counted

    def _fsync(self, descriptor: int) -> None:
        """Count an fsync, which takes no time here: no test cuts the power."""
        self.attempt("fsync", _path_of(descriptor))

    def _rename(self, original: Callable[..., None]) -> Callable[..., None]:
        def rename_counted(source: Any, target: Any, **folders: Any) -> None:
            self.attempt("rename", _path_of(target))
            original(source, target, **folders)

        return rename_counted

    def _one_path(self, operation: str, original: Callable[..., None]) -> Callable[..., None]:
        def counted(path: Any, *arguments: Any, dir_fd: int | None = None) -> None:
            self.attempt(operation, _path_of(path, dir_fd))
            original(path, *arguments, dir_fd=dir_fd)

        return counted


class _CountedFile(io.FileIO):
    """A file without a buffer whose writes are counted."""

    attempt_write: Callable[[], None]

    def write(self, content: Any) -> int:
        self.attempt_write()
        return super().write(content)

    def truncate(self, size: int | None = None) -> int:
        self.attempt_write()
        return super().truncate(size)


def _path_of(file: Any, folder: int | None = None) -> Path:
    """Return the path of a file or descriptor, absolute; links in it are kept."""
    if isinstance(file, int):
        return Path(f"/proc/self/fd/{file}").readlink()
    path = Path(os.fsdecode(file))
    if folder is not None:
        path = _path_of(folder) / path
    return Path(os.path.abspath(path))  # noqa: PTH100
