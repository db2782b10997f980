"""Tile sizes that were measured on this machine, kept on disk.

They are in the user's cache directory: a folder per GPU and release of Triton, and a file per kind
of call and shape. A file appears as a whole. If two processes measured the same shape, the first
result stays, so all processes go on with the same choice.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

import triton
from attrs import define, field

from arb_ternary_triton.entries import LAST_CALLS, Entry, Kind, row_bound
from arb_ternary_triton.gpu import Gpu
from arb_ternary_triton.launch import power_of_two_up
from arb_ternary_triton.plugin import CACHE_HOME

#: Rows, outputs and columns that stand for those of a call.
Bucket = tuple[int, int, int]

_log: Final = logging.getLogger("arb_ternary.backends")


@lru_cache(LAST_CALLS)
def bucket_of(rows: int, outputs: int, columns: int) -> Bucket:
    """Return the shape that stands for a call's shape.

    It has the bound of the rows, and powers of two from 128 to 65536 for the weight.
    """
    return row_bound(rows), _size_bound(outputs), _size_bound(columns)


def _size_bound(size: int) -> int:
    return min(max(power_of_two_up(size), 128), 1 << 16)


@define(eq=False)
class UserTable:
    """Entries measured on a GPU.

    Attributes:
        folder: where they are kept.
    """

    folder: Path
    _known: dict[tuple[Kind, Bucket], Entry | None] = field(factory=dict, init=False)

    def find(self, kind: Kind, bucket: Bucket) -> Entry | None:
        """Return the measured entry of a bucket; its file is read once."""
        key = (kind, bucket)
        if key not in self._known:
            self._known[key] = _read(self._path(kind, bucket))
        return self._known[key]

    def keep(self, kind: Kind, bucket: Bucket, entry: Entry) -> Entry:
        """Write an entry to its file, and return the entry that holds from now on.

        That is another process's result if it came first. If the file cannot be written, a warning
        is logged, and the result holds for this process.
        """
        path = self._path(kind, bucket)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.folder, encoding="utf-8") as file:
                json.dump(entry.to_json(), file)
                file.flush()
                with suppress(FileExistsError):  # another process came first
                    os.link(file.name, path)
            entry = _read(path) or entry
        except OSError as error:
            _log.warning("%s: measured tiles cannot be kept: %s", path, error)
        self._known[kind, bucket] = entry
        return entry

    def _path(self, kind: Kind, bucket: Bucket) -> Path:
        sizes = "x".join(map(str, bucket))
        return self.folder / f"{_file_name(*kind)}-{sizes}.json"


def _read(path: Path) -> Entry | None:
    """Read an entry; a damaged file is removed with a warning."""
    try:
        return Entry(*json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        _log.warning("%s: not a measured tile, so it is ignored: %s", path, error)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s: cannot be removed: %s", path, error)
    return None


def _file_name(*words: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower()).strip("-")


@cache
def user_table(gpu: Gpu) -> UserTable:
    """Return the table of entries measured on a GPU with its name.

    Its folder is the one that the environment named at the first call.
    """
    given = CACHE_HOME.read().strip()
    # The specification of that variable says to ignore a relative path.
    base = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    name = _file_name(gpu.family, gpu.name)
    return UserTable(base / "arb-ternary" / "triton" / name / str(triton.__version__))
