"""The GPU that kernels are for."""

from __future__ import annotations

from functools import cache

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
        """Whether it is NVIDIA's, rather than AMD's."""
        return self.family.startswith("sm_")

    @property
    def instruction_set(self) -> int:
        """Its instructions for bytes, as ``kernels.decoding`` numbers them; 0 for none."""
        if self.nvidia:
            return 1
        if self.family in ("gfx942", "gfx950"):
            return 2
        return 3 if self.family.startswith(("gfx11", "gfx12")) else 0


def gpu_of(device: torch.device) -> Gpu:
    """Return the GPU of a device; of ``cuda`` without an index, the current one."""
    return _gpu_at(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _gpu_at(index: int) -> Gpu:
    facts = torch.cuda.get_device_properties(index)
    if torch.version.hip is None:
        family = f"sm_{facts.major}{facts.minor}"
    else:
        family = facts.gcnArchName.partition(":")[0]
    return Gpu(family, facts.multi_processor_count, facts.name)
