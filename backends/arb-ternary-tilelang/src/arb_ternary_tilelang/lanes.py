"""The lane that serves a device."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from arb_ternary_tilelang.lane import Lane, cpu_lane, cuda_lane

#: The compute capability from which on a target has instructions that only its ``a`` form takes:
#: TileLang uses those that divide registers among warps.
_OWN_INSTRUCTIONS: Final = 90


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
        suffix = "a" if capability >= _OWN_INSTRUCTIONS else ""
        return _cuda(f"sm_{capability}{suffix}")
    raise TypeError(f"the tilelang backend serves cpu and cuda, got a tensor on {device}")
