"""The kernels on a GPU: whether there is one, and how calls are timed on it."""

from __future__ import annotations

from typing import Any, Final

import torch

from arb_ternary.errors import EnvironmentProblem
from harness.timing import Clock, Variant

#: Cycles that the GPU idles before a call, about half a millisecond. Meanwhile the call is queued,
#: so that the GPU's work is timed and not the time that Python takes to ask for it.
_HEAD_START: Final = 1_000_000
#: Seconds that the head start, emptying the cache and waiting take per call, about.
SPACING: Final = 1e-3
#: Second-level caches that a flush writes.
_BEYOND: Final = 2


def check_device(device: str) -> None:
    """Refuse a GPU that is missing, and make it torch's current device.

    Raises:
        EnvironmentProblem: there is no such GPU.
    """
    if device == "cpu":
        return
    try:
        torch.cuda.set_device(device)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise EnvironmentProblem(
            f"--device {device}: {error}",
            "run it on a machine with a GPU and a build of torch for it; `arb doctor` shows what "
            "is here, and `arb backends list --device cuda` what every backend needs",
        ) from error


def gpu_name(device: str) -> str | None:
    """Return the GPU and its software for the record; None on the CPU."""
    if device == "cpu":
        return None
    software = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return f"{torch.cuda.get_device_name(device)}, {software}"


def gpu_clock(device: str, *, cold: bool, cache_bytes: int) -> Clock:
    """Return what times a call by events; ``cold`` first overwrites more than the cache."""
    room = torch.empty(_BEYOND * cache_bytes if cold else 0, dtype=torch.uint8, device=device)
    sleep: Any = torch.cuda._sleep
    event: Any = torch.cuda.Event

    def seconds(variant: Variant, i: int) -> float:
        start = event(enable_timing=True)
        end = event(enable_timing=True)
        room.zero_()
        sleep(_HEAD_START)
        start.record()
        variant.call(i)
        end.record()
        end.synchronize()
        return 1e-3 * float(start.elapsed_time(end))

    return seconds
