"""The lane that serves a device."""

from __future__ import annotations

from functools import cache

import torch

from arb_ternary_tilelang.lane import Lane, cpu_lane, cuda_lane

#: Compute capabilities whose instructions need a target of their own.
_SPECIAL = {90: "sm_90a", 100: "sm_100a"}


@cache
def _cpu() -> Lane:
    return cpu_lane()


@cache
def _cuda(arch: str) -> Lane:
    return cuda_lane(arch)


def lane_of(device: torch.device) -> Lane:
    """Return the lane of a tensor's device.

    Raises:
        TypeError: the kernels serve no such device.
    """
    if device.type == "cpu":
        return _cpu()
    if device.type == "cuda" and torch.version.cuda is not None:
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
        return _cuda(_SPECIAL.get(capability, f"sm_{capability}"))
    raise TypeError(f"the tilelang backend serves cpu and cuda, got a tensor on {device}")
