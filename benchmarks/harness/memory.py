"""Memory of this process, now and at its peak: resident, or of its tensors on a GPU."""

from __future__ import annotations

from pathlib import Path

import torch


def peak_bytes() -> int:
    """Return the largest resident memory that this process has had."""
    # The peak may lag behind the memory that is resident now.
    return max(_status("VmHWM"), resident_bytes())


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return _status("VmRSS")


def device_peak_bytes(device: str) -> int:
    """Return the peak of the tensors on a GPU, or of the whole process on the CPU."""
    return peak_bytes() if device == "cpu" else torch.cuda.max_memory_allocated(device)


def _status(name: str) -> int:
    """Return the bytes of a line ``Name:  1234 kB``; 0 where the system has no such file."""
    file = Path("/proc/self/status")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 if found else 0
