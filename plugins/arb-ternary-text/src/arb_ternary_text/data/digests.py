"""A set of digests that grows on disk and not in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

#: Bytes of a digest.
DIGEST_BYTES: Final = 16
_DTYPE: Final = np.dtype(f"S{DIGEST_BYTES}")
#: Digests that are in memory, some 100 bytes each.
_RECENT: Final = 1 << 18
#: Digests of a page of the file, of which memory has the first one.
_PAGE: Final = 256
#: Digests of the file that are merged at once.
_BLOCK: Final = 1 << 18


class DigestSet:
    """A set of digests of 16 bytes.

    The newest ones are in memory. When they are many, they are merged into a sorted file without a
    name, which the operating system deletes when the process ends. A lookup reads one page of it.
    Memory is 30 MB, and one byte for 16 digests.

    Args:
        folder: where the file is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._recent: set[bytes] = set()
        self._file: Any = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._first_of_pages = np.empty(0, _DTYPE)

    def close(self) -> None:
        """Delete the file."""
        self._file.close()

    def add(self, digest: bytes) -> bool:
        """Add a digest, and return whether it is new."""
        if digest in self._recent or self._is_in_file(digest):
            return False
        self._recent.add(digest)
        if len(self._recent) >= _RECENT:
            self._merge()
        return True

    def _is_in_file(self, digest: bytes) -> bool:
        page = int(np.searchsorted(self._first_of_pages, np.bytes_(digest), side="right")) - 1
        if page < 0:
            return False
        size = _PAGE * DIGEST_BYTES
        digests = np.frombuffer(os.pread(self._file.fileno(), size, page * size), _DTYPE)
        place = int(np.searchsorted(digests, np.bytes_(digest)))
        return digests[place : place + 1].tobytes() == digest

    def _merge(self) -> None:
        """Write a new file with the digests of the old one and those in memory."""
        recent = np.frombuffer(b"".join(sorted(self._recent)), _DTYPE)
        merged = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        firsts = []
        count = 0
        for old in self._blocks():
            upto = int(np.searchsorted(recent, old[-1])) if len(old) else len(recent)
            block = np.sort(np.concatenate([old, recent[:upto]]), kind="stable")
            recent = recent[upto:]
            merged.write(block.tobytes())
            firsts.append(block[-count % _PAGE :: _PAGE].copy())
            count += len(block)
        merged.flush()
        self._file.close()
        self._file = merged
        self._first_of_pages = np.concatenate(firsts)
        self._recent = set()

    def _blocks(self) -> Iterator[NDArray[np.bytes_]]:
        """Yield the digests of the file in order, and an empty block at its end."""
        self._file.seek(0)
        content = b"-"
        while content:
            content = self._file.read(_BLOCK * DIGEST_BYTES)
            yield np.frombuffer(content, _DTYPE)
