"""Token files: ids that are written once and memory-mapped by every run.

A corpus may then be larger than the memory. A ``.bin`` file consists of little-endian integers,
whose dtype the config gives. A ``.npy`` file knows its own.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from arb_ternary.errors import DataError

#: The integer types that a token file may hold.
DTYPES: Final = ("uint8", "uint16", "uint32", "int32", "int64")


class TokenFile(np.memmap[Any, np.dtype[Any]]):
    """A token stream mapped from a file, which can check the ids that are read from it.

    Attributes:
        path: the file.
        header: number of bytes in front of the first token.
        first: index in the file of the stream's first token; a slice has its own.
        vocabulary_size: ids at or beyond it are errors.
    """

    path: str
    header: int
    first: int
    vocabulary_size: int

    def __array_finalize__(self, obj: object) -> None:
        super().__array_finalize__(obj)
        if isinstance(obj, TokenFile):
            moved = self.__array_interface__["data"][0] - obj.__array_interface__["data"][0]
            self.path = obj.path
            self.header = obj.header
            self.vocabulary_size = obj.vocabulary_size
            self.first = obj.first + moved // self.dtype.itemsize

    def check(self, ids: NDArray[np.int64], start: int) -> None:
        """Check ids that were read from ``start`` on against the vocabulary.

        A file is checked as it is read, because reading all of it first could take hours.

        Raises:
            DataError: an id is negative or too large; the message names the file and the index of
                the token.
        """
        if ids.size and (int(ids.max()) >= self.vocabulary_size or int(ids.min()) < 0):
            wrong = int(np.flatnonzero((ids >= self.vocabulary_size) | (ids < 0))[0])
            index = self.first + start + wrong
            raise DataError(
                f"{self.path}: token {index} (byte {self.header + index * self.dtype.itemsize}) is "
                f"{int(ids[wrong])}, outside the vocabulary of {self.vocabulary_size} ids",
                "The file belongs to another tokenizer, was written with another dtype, or is "
                "damaged.",
            )


def open_tokens(
    path: str | Path,
    vocabulary_size: int,
    *,
    dtype: str | None = None,
) -> TokenFile:
    """Map a token file read-only.

    Args:
        path: a ``.bin`` file of little-endian integers, or a one-dimensional ``.npy`` file.
        vocabulary_size: ids at or beyond it are errors when they are read.
        dtype: integer type of a ``.bin`` file; for a ``.npy`` file None, or the type in the file.

    Raises:
        DataError: the file is missing, empty or not a token file, or its size does not fit the
            dtype.
    """
    path = Path(path)
    if path.suffix not in {".bin", ".npy"}:
        raise DataError(
            f"{path}: a token file must end in .bin or .npy", "`write_tokens` writes both."
        )
    if dtype is not None and dtype not in DTYPES:
        raise DataError(f"{path}: dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(
            f"{path}: the token file cannot be read: {error.strerror}",
            f"Paths are relative to the working directory, {Path.cwd()}.",
        ) from error
    if size == 0:
        raise DataError(f"{path}: the token file is empty")
    if path.suffix == ".bin":
        found, offset, count = _bin_layout(path, size, dtype)
    else:
        found, offset, count = _npy_layout(path, dtype)
    stream = TokenFile(path, dtype=found, mode="r", offset=offset, shape=(count,))
    stream.path = str(path)
    stream.header = offset
    stream.first = 0
    stream.vocabulary_size = vocabulary_size
    return stream


def write_tokens(path: str | Path, ids: ArrayLike, dtype: str) -> None:
    """Write ids to a ``.bin`` or ``.npy`` file.

    The file appears whole or not at all; an existing one is replaced.

    Args:
        path: the file; its suffix chooses the format.
        ids: token ids ``[L]``, integers.
        dtype: integer type on disk, one of ``DTYPES``.

    Raises:
        DataError: an id does not fit the dtype (its index is named), ``ids`` are not ids, or the
            file cannot be written.
    """
    path = Path(path)
    if path.suffix not in {".bin", ".npy"}:
        raise DataError(f"{path}: a token file must end in .bin or .npy")
    if dtype not in DTYPES:
        raise DataError(f"{path}: dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    ids_L = np.asarray(ids)
    if ids_L.ndim != 1 or ids_L.dtype.kind not in "iu" or not ids_L.size:
        raise DataError(
            f"{path}: ids must be integers in one dimension, at least one; got {ids_L.dtype} "
            f"{ids_L.shape}"
        )
    largest = int(np.iinfo(dtype).max)
    if int(ids_L.max()) > largest or int(ids_L.min()) < 0:
        wrong = int(np.flatnonzero((ids_L > largest) | (ids_L < 0))[0])
        raise DataError(
            f"{path}: id {int(ids_L[wrong])} at index {wrong} does not fit {dtype}: 0 to {largest}"
        )
    content = ids_L.astype(np.dtype(dtype).newbyteorder("<"))
    try:
        _replace(path, content)
    except OSError as error:
        raise DataError(f"{path}: the token file cannot be written: {error.strerror}") from error


def _replace(path: Path, content: NDArray[Any]) -> None:
    """Write next to ``path``, flush to disk, then rename, so that no reader sees half a file."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            if path.suffix == ".npy":
                np.save(file, content, allow_pickle=False)
            else:
                file.write(content.data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _bin_layout(path: Path, size: int, dtype: str | None) -> tuple[np.dtype[Any], int, int]:
    """Return dtype, byte offset of the first token and number of tokens of a ``.bin`` file."""
    if dtype is None:
        raise DataError(
            f"{path}: a .bin file does not say what it holds",
            f"Set dtype: one of {', '.join(DTYPES)}.",
        )
    found = np.dtype(dtype).newbyteorder("<")
    if size % found.itemsize:
        raise DataError(
            f"{path}: {size} bytes are not a whole number of {dtype} ({found.itemsize} bytes each)",
            "The file is truncated, or has another dtype.",
        )
    return found, 0, size // found.itemsize


def _npy_layout(path: Path, dtype: str | None) -> tuple[np.dtype[Any], int, int]:
    """Return the same of a ``.npy`` file, from its header."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(
            f"{path}: not a readable .npy file: {error}", "The file is truncated or damaged."
        ) from error
    if not isinstance(array, np.memmap) or array.ndim != 1 or array.dtype.name not in DTYPES:
        raise DataError(
            f"{path}: a token file must hold {', '.join(DTYPES)} in one dimension, not "
            f"{array.dtype} {array.shape}"
        )
    if not array.size:
        raise DataError(f"{path}: the token file is empty")
    if dtype is not None and dtype != array.dtype.name:
        raise DataError(
            f"{path}: the file holds {array.dtype.name} and dtype is {dtype}",
            "Leave dtype out for .npy files.",
        )
    return array.dtype, int(array.offset), int(array.size)
