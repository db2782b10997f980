"""Writes files whole or not at all, also across a kill or a loss of power."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a hidden path to write to, which is flushed to the disk and then renamed to ``path``.

    An exception in the ``with`` block leaves ``path`` as it was. To have the rename survive a loss
    of power, ``flush`` the folder as well.

    Raises:
        OSError: the disk refuses, or nothing was written.
    """
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with naming(path):
            yield temporary
            flush(temporary)
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def flush(path: Path) -> None:
    """Make a file, or the names in a folder, survive a loss of power, if the system can.

    Raises:
        OSError: the disk refuses.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():
            # Windows opens no folders.
            return
        raise
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an OSError in the ``with`` block name ``path`` if it names no file.

    The system does not say which file a descriptor belongs to that cannot be written or flushed.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
