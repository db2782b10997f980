"""The backend: its name, what it promises, and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import field, frozen
from torch import Tensor

from arb_ternary.backends.protocol import (
    FUSED_VOTES,
    NARROW_NOISE,
    NARROW_VOTES,
    ROW_SHARDS,
    KernelBackend,
)
from arb_ternary_cpu import (
    _native,
    attention,
    blocks,
    convolution,
    decode,
    limits,
    products,
    votes,
    wire,
)
from arb_ternary_cpu.isa import chosen_isa
from arb_ternary_cpu.sources import check_sources


@frozen
class CpuBackend:
    """The native backend for one instruction set.

    Attributes:
        isa: the instruction set of the kernels.
    """

    isa: str
    name: str = "cpu"
    capabilities: frozenset[str] = frozenset({FUSED_VOTES, NARROW_NOISE, NARROW_VOTES, ROW_SHARDS})
    kernels: Mapping[str, Callable[..., object]] = field(factory=dict, repr=False)

    def probe_read(self, buffer: Tensor) -> int:
        """Read all of a contiguous uint8 tensor; return the sum of its 64-bit words."""
        return limits.read_bytes(_native.isa_index(self.isa), buffer)

    def probe_int8_peak(self, seconds: float) -> float:
        """Return operations per second of the int8 units, measured for about ``seconds``."""
        return limits.int8_peak(_native.isa_index(self.isa), seconds)


def build(isa: str | None = None) -> KernelBackend:
    """The backend for ``isa``, or for the one that ``ARB_TERNARY_CPU_ISA`` or the processor
    chooses.

    Raises:
        UsageProblem, EnvironmentProblem: the instruction set is unknown, or cannot be used here; or
            the extension module was not built from the sources of this checkout.
    """
    check_sources()
    chosen = chosen_isa(isa)
    index = _native.isa_index(chosen)
    multiplied = products.kernels(index)
    convolved = convolution.kernels(index, multiplied["linear"])
    kernels: dict[str, Callable[..., object]] = {**multiplied, **convolved}
    for module in (attention, blocks, decode, votes, wire):
        kernels |= module.kernels(index)
    return CpuBackend(chosen, kernels=kernels)
