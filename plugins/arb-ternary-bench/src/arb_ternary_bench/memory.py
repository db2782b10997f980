"""Memory of this process, now and at its peak: resident, or of its tensors on a GPU."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_MEMORY = Path("/proc/meminfo")


def peak_bytes() -> int:
    """Return the largest resident memory that this process has had.

    Linux's own count is preferred: what ``getrusage`` reports there includes the memory of the
    parent at the moment when it started this process. That count may lag behind the memory that is
    resident now.
    """
    found = _field(_STATUS, "VmHWM")
    if found is not None:
        return max(found, _field(_STATUS, "VmRSS") or 0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int:
    """Return the resident memory of this process, or its peak where the system says no more."""
    found = _field(_STATUS, "VmRSS")
    return peak_bytes() if found is None else found


def device_bytes(device: str) -> int:
    """Return the memory in use on a device: tensors on a GPU, the whole process on the CPU."""
    return resident_bytes() if device == "cpu" else torch.cuda.memory_allocated(device)


def device_peak_bytes(device: str) -> int:
    """Return the peak of :func:`device_bytes`."""
    return peak_bytes() if device == "cpu" else torch.cuda.max_memory_allocated(device)


def available_bytes() -> int | None:
    """Return the memory that is free without swapping, or None where the system does not say."""
    return _field(_MEMORY, "MemAvailable")


def _field(file: Path, name: str) -> int | None:
    """Read a line ``Name:  1234 kB`` and return the number of bytes."""
    if not file.exists():
        return None
    for line in file.read_text(encoding="utf-8").splitlines():
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * 1024
    return None
