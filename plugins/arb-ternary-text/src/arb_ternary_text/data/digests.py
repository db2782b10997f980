"""A set of digests that grows on disk and not in memory."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

#: Bytes of a digest.
DIGEST_BYTES: Final = 16
#: Memory for pages of the file, in KiB.
_CACHE: Final = 32 << 10
_NAME: Final = "digests.sqlite"


class DigestSet:
    """A set of digests of 16 bytes, in a file that is deleted when it is closed.

    Args:
        folder: where the file is; one of that name, which another process has left, is replaced.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._path.unlink(missing_ok=True)
        self._database = sqlite3.connect(self._path, isolation_level=None)
        # What is in the file is worth nothing without this process.
        for setting in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{_CACHE}"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute("CREATE TABLE digests (digest BLOB PRIMARY KEY) WITHOUT ROWID")
        self._database.execute("BEGIN")

    def close(self) -> None:
        """Delete the file."""
        self._database.close()
        self._path.unlink(missing_ok=True)

    def add(self, digest: bytes) -> bool:
        """Add a digest, and return whether it is new."""
        added = self._database.execute("INSERT OR IGNORE INTO digests VALUES (?)", (digest,))
        return added.rowcount == 1
