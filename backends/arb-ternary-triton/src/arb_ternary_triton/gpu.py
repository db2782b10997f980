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
        """Whether it is NVIDIA's, rather than AMD's."""
        return self.family.startswith("sm_")

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a program may have."""
        if not self.nvidia:
            return 160 * 1024 if self.family == "gfx950" else 64 * 1024
        # What a program of a data-centre GPU may have, and one of the others.
        large = {"sm_80": 163, "sm_87": 163, "sm_90": 227, "sm_100": 227, "sm_103": 227}
        return large.get(self.family, 99) * 1024

    @property
    def instruction_set(self) -> int:
        """Its instructions for bytes, as ``kernels.decoding`` numbers them; 0 for none."""
        if self.nvidia:
            return 1
        if self.family in ("gfx942", "gfx950"):
            return 2
        return 3 if self.family.startswith(("gfx11", "gfx12")) else 0


#: GPUs of the shipped table: A100; H100 and H200; MI300X.
KNOWN: Final = {
    "sm_80": Gpu("sm_80", 108),
    "sm_90": Gpu("sm_90", 132),
    "gfx942": Gpu("gfx942", 304),
}
#: GPUs that kernels are compiled for: also RTX 3090, RTX 4090, B200, RTX 5090, MI350X, RX 7900 XTX.
COMPILED: Final = {
    **KNOWN,
    "sm_86": Gpu("sm_86", 82),
    "sm_89": Gpu("sm_89", 128),
    "sm_100": Gpu("sm_100", 148),
    "sm_120": Gpu("sm_120", 170),
    "gfx950": Gpu("gfx950", 256),
    "gfx1100": Gpu("gfx1100", 96),
}


def index_of(device: torch.device) -> int:
    """Return the index of a CUDA device; of ``cuda`` without one, that of the current device."""
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def gpu_of(index: int) -> Gpu:
    """Return the GPU that torch calls ``cuda:index``."""
    facts = torch.cuda.get_device_properties(index)
    if torch.version.hip is None:
        family = f"sm_{facts.major}{facts.minor}"
    else:
        family = facts.gcnArchName.partition(":")[0]
    return Gpu(family, facts.multi_processor_count, facts.name)
