"""Memory of this process, now and at its peak: resident, or of its tensors on a GPU."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_MEMORY = Path("/proc/meminfo")


def peak_bytes() -> int:
    """The most that this process has held.

    Linux's count for the program itself; what ``getrusage`` says there includes what the parent
    held when it started the process.
    """
    found = _field(_STATUS, "VmHWM")
    if found is not None:
        return found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int:
    """What this process holds now; its peak where the system does not tell."""
    found = _field(_STATUS, "VmRSS")
    return peak_bytes() if found is None else found


def device_bytes(device: str) -> int:
    """What this process holds on a device now: its tensors on a GPU, all of it on the processor."""
    return resident_bytes() if device == "cpu" else torch.cuda.memory_allocated(device)


def device_peak_bytes(device: str) -> int:
    """The most that this process has held on a device, as :func:`device_bytes`."""
    return peak_bytes() if device == "cpu" else torch.cuda.max_memory_allocated(device)


def available_bytes() -> int | None:
    """Memory that new programs could use without swapping; None where the system does not tell."""
    return _field(_MEMORY, "MemAvailable")


def _field(file: Path, name: str) -> int | None:
    """``Name:  1234 kB`` in bytes."""
    if not file.exists():
        return None
    for line in file.read_text(encoding="utf-8").splitlines():
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * 1024
    return None
