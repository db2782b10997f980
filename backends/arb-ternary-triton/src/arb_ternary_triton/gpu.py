"""The GPU that kernels are for: the GPU of a tensor, or one that is only compiled for."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from attrs import frozen


@frozen
class Gpu:
    """Facts about a GPU that decide tile sizes.

    Attributes:
        family: instruction set: ``sm_90``, ``gfx942``.
        multiprocessors: number of multiprocessors.
        name: the driver's name; empty for a GPU that is only compiled for.
    """

    family: str
    multiprocessors: int
    name: str = ""

    @property
    def nvidia(self) -> bool:
        """Whether it has NVIDIA's dot product of four bytes, rather than AMD's instructions."""
        return self.family.startswith("sm_")


#: GPUs of the shipped table: A100; H100 and H200; MI300X.
KNOWN: Final = {
    "sm_80": Gpu("sm_80", 108),
    "sm_90": Gpu("sm_90", 132),
    "gfx942": Gpu("gfx942", 304),
}


@cache
def gpu_of(index: int) -> Gpu:
    """Return the GPU that torch calls ``cuda:index``."""
    facts = torch.cuda.get_device_properties(index)
    if torch.version.hip is None:
        family = f"sm_{facts.major}{facts.minor}"
    else:
        family = facts.gcnArchName.partition(":")[0]
    return Gpu(family, facts.multi_processor_count, facts.name)
