"""Tables of tile sizes: the shipped one, and those measured on this machine and kept on disk.

The shipped table, ``tiles.json``, holds the model's choices for the GPUs in
:data:`arb_ternary_triton.gpu.KNOWN`. It was made without a GPU, so nothing in it is measured.

Measured choices are kept in the user's cache directory, in one file per GPU. Another release of
Triton measures again. A file is replaced as a whole, under a lock. If two processes measure at the
same time, the results of both are kept. If they measured the same shape, the first result stays, so
all processes go on with the same choice.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from threading import RLock
from typing import Any, Final

import triton
from attrs import define, field, frozen

from arb_ternary_triton.entries import KINDS, Entry, Kind, bounds_of, kind_name, modelled, row_bound
from arb_ternary_triton.gpu import KNOWN, Gpu
from arb_ternary_triton.launch import power_of_two_up
from arb_ternary_triton.plugin import CACHE_HOME

FORMAT: Final = "arb-ternary-triton-tiles"
_VERSION: Final = 1
_ORIGIN: Final = (
    "Choices of the analytic model; no GPU was at hand when they were made, and "
    "nothing here is measured."
)

#: Rows, outputs and columns that stand for those of a call.
Bucket = tuple[int, int, int]

_log = logging.getLogger("arb_ternary.backends")
#: Shapes of calls whose choices are kept; prompts have any number of rows.
_LAST_CALLS: Final = 1024


@lru_cache(_LAST_CALLS)
def bucket_of(rows: int, outputs: int, columns: int) -> Bucket:
    """Return the shape that stands for a call's shape.

    It has the bound of the rows, and powers of two from 128 to 65536 for the weight.
    """
    return row_bound(rows), _size_bound(outputs), _size_bound(columns)


def _size_bound(size: int) -> int:
    return min(max(power_of_two_up(size), 128), 1 << 16)


# --- shipped


def shipped_document() -> dict[str, Any]:
    """Return the content of ``tiles.json``: an entry per GPU, kind and number of rows."""
    families = {}
    for gpu in KNOWN.values():
        kinds = {}
        for kind in KINDS:
            kinds[kind_name(kind)] = {
                str(rows): modelled(kind, rows, gpu).to_json() for rows in bounds_of(kind)
            }
        families[gpu.family] = kinds
    return {"format": FORMAT, "version": _VERSION, "origin": _ORIGIN, "gpus": families}


@cache
def _shipped() -> Mapping[str, Mapping[str, Mapping[str, list[int]]]]:
    text = resources.files(__package__).joinpath("tiles.json").read_text(encoding="utf-8")
    gpus: Mapping[str, Mapping[str, Mapping[str, list[int]]]] = json.loads(text)["gpus"]
    return gpus


@lru_cache(_LAST_CALLS)
def shipped(kind: Kind, rows: int, gpu: Gpu) -> Entry:
    """Return the shipped entry: by the GPU's name, else by its family, else the model's."""
    bound = row_bound(rows)
    for key in (gpu.name, gpu.family):
        found = _shipped().get(key, {}).get(kind_name(kind), {}).get(str(bound))
        if found is not None:
            return Entry(*found)
    return modelled(kind, bound, gpu)


# --- measured


@frozen
class Measured:
    """A measured entry, and the seconds of a call with it."""

    entry: Entry
    seconds: float


@define
class UserTable:
    """Entries measured on one GPU with one release of Triton.

    Attributes:
        path: the file; it need not exist.
        release: release of Triton; entries of another release do not count.
    """

    path: Path
    release: str
    _found: dict[str, Measured] | None = field(default=None, init=False)
    _lock: Any = field(factory=RLock, init=False, repr=False)

    def find(self, kind: Kind, bucket: Bucket) -> Measured | None:
        """Return the measured entry of a bucket; the file is read once."""
        with self._lock:
            if self._found is None:
                self._found = self._read()
            return self._found.get(_key(kind, bucket))

    def keep(self, kind: Kind, bucket: Bucket, measured: Measured) -> Measured:
        """Add a result to the file, and return the entry that holds from now on.

        That is another process's result if it came first. If the file cannot be written, a warning
        is logged, and the result holds for this process.
        """
        key = _key(kind, bucket)
        with self._lock:
            known = self._found or {}
            try:
                with _locked(self.path):
                    known = {**known, **self._read()}
                    known.setdefault(key, measured)
                    self._write(known)
            except OSError as error:
                _log.warning("%s: measured tiles cannot be kept: %s", self.path, error)
                known.setdefault(key, measured)
            self._found = known
            return known[key]

    def _read(self) -> dict[str, Measured]:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            return self._ignored(error)
        try:
            document = json.loads(text)
            if (document["format"], document["version"]) != (FORMAT, _VERSION):
                raise ValueError("another format or version")
            if document["triton"] != self.release:
                return {}
            return {
                key: Measured(Entry(*one["tile"]), float(one["seconds"]))
                for key, one in document["measured"].items()
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return self._ignored(error)

    def _ignored(self, error: Exception) -> dict[str, Measured]:
        _log.warning(
            "%s: not a table of measured tiles, so it is ignored: %s: %s",
            self.path,
            type(error).__name__,
            error,
        )
        return {}

    def _write(self, measured: Mapping[str, Measured]) -> None:
        rows = {
            key: {"tile": one.entry.to_json(), "seconds": one.seconds}
            for key, one in sorted(measured.items())
        }
        document = {"format": FORMAT, "version": _VERSION, "triton": self.release, "measured": rows}
        handle, name = tempfile.mkstemp(prefix=f"{self.path.name}.", dir=self.path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(document, file, indent=1)
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


@cache
def _key(kind: Kind, bucket: Bucket) -> str:
    return f"{kind_name(kind)}, {' x '.join(map(str, bucket))}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file.

    The lock is on a second file, because the file itself is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def _folder(given: str) -> Path:
    # The specification of that variable says to ignore a relative path.
    base = Path(given) if given and Path(given).is_absolute() else Path.home() / ".cache"
    return base / "arb-ternary" / "triton"


@cache
def _table(path: Path, release: str) -> UserTable:
    return UserTable(path, release)


@cache
def user_table(gpu: Gpu) -> UserTable:
    """Return the table of entries measured on a GPU with its name; one object per file.

    Its folder is the one that the environment named at the first call.
    """
    name = re.sub(r"[^a-z0-9]+", "-", f"{gpu.family} {gpu.name}".lower()).strip("-")
    folder = _folder(CACHE_HOME.read().strip())
    return _table(folder / f"{name}.json", str(triton.__version__))
