"""Files that are there whole or not at all, also after a kill or a loss of power."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what is to become ``path``: a hidden name beside it, renamed once it is on the
    disk.

    What is raised within leaves ``path`` as it was. That a rename survives a loss of power takes a
    ``flush`` of the folder besides.

    Raises:
        OSError: the disk refuses, or nothing was written.
    """
    temporary = path.with_name(f".{path.name}.writing")
    try:
        yield temporary
        flush(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, survive a loss of power, where the system can.

    Raises:
        OSError: the disk refuses.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():  # Windows opens no folders
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
