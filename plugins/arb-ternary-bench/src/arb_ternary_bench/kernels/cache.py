"""The size of the last-level cache, and how many copies of an operand miss it for certain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from attrs import frozen

#: Size if the system does not say.
_GUESS: Final = 64 << 20
#: Copies of a cold operand take this many times the cache: replacement is not strictly by age.
_BEYOND: Final = 2
#: An operand of this many times the cache misses it alone.
_ALONE: Final = 4


@frozen
class Cache:
    """The size of the last-level cache, and where that number is from."""

    nbytes: int
    source: str


def last_level_cache(root: Path = Path("/sys/devices/system/cpu")) -> Cache:
    """Add up all last-level caches of the machine: threads may run under each of them."""
    found: dict[str, tuple[int, int]] = {}
    for index in sorted(root.glob("cpu[0-9]*/cache/index[0-9]*")):
        try:
            kind = (index / "type").read_text().strip()
            size = (index / "size").read_text().strip()
            level = int((index / "level").read_text())
            shared = (index / "shared_cpu_list").read_text().strip()
        except (OSError, ValueError):
            continue
        if kind != "Instruction":
            found[f"{level}:{shared}"] = (level, _bytes(size))
    if found:
        deepest = max(level for level, _ in found.values())
        return Cache(
            sum(size for level, size in found.values() if level == deepest),
            f"level {deepest}, {root}",
        )
    if sys.platform == "darwin":
        output = subprocess.run(
            ["sysctl", "-n", "hw.l2cachesize"], capture_output=True, text=True, check=False
        ).stdout
        if output.strip().isdecimal():
            return Cache(2 * int(output), "twice hw.l2cachesize, for the system cache behind it")
    return Cache(_GUESS, "a guess: the system does not say")


def _bytes(size: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1:], 1)
    return int(size.rstrip("KMG")) * unit


def copies_beyond(cache_bytes: int, operand_bytes: int) -> int:
    """Return how many copies of an operand take twice the cache together: at least two.

    One copy is enough if it is four times as large as the cache.
    """
    if operand_bytes >= _ALONE * cache_bytes:
        return 1
    return max(2, -(-_BEYOND * cache_bytes // max(operand_bytes, 1)))
