"""Which GPU kernels are for: the one that a tensor is on, or one that is only compiled for."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from attrs import frozen


@frozen
class Gpu:
    """What the choice of tiles asks about a GPU.

    Attributes:
        family: its instruction set: ``sm_90``, ``gfx942``.
        multiprocessors: their number.
        name: as its driver calls it; empty for one that is only compiled for.
    """

    family: str
    multiprocessors: int
    name: str = ""

    @property
    def nvidia(self) -> bool:
        """Whether it has NVIDIA's dot product of four bytes, and not AMD's instructions."""
        return self.family.startswith("sm_")


#: GPUs of the shipped table: A100, H100 and H200, MI300X.
KNOWN: Final = {
    gpu.family: gpu for gpu in (Gpu("sm_80", 108), Gpu("sm_90", 132), Gpu("gfx942", 304))
}


@cache
def gpu_of(index: int) -> Gpu:
    """The GPU that torch calls ``cuda:index``."""
    facts = torch.cuda.get_device_properties(index)
    if torch.version.hip is None:
        return Gpu(f"sm_{facts.major}{facts.minor}", facts.multi_processor_count, facts.name)
    return Gpu(facts.gcnArchName.partition(":")[0], facts.multi_processor_count, facts.name)
