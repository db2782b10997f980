"""The backend: its name, what it promises, and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import field, frozen

from arb_ternary.backends.protocol import FUSED_VOTES, NARROW_VOTES, KernelBackend
from arb_ternary_cpu import _native, products, votes
from arb_ternary_cpu.isa import chosen_isa

__all__ = ["CpuBackend", "build"]


@frozen
class CpuBackend:
    """The native backend for one instruction set.

    Attributes:
        isa: the instruction set of the kernels.
    """

    isa: str
    name: str = "cpu"
    capabilities: frozenset[str] = frozenset({FUSED_VOTES, NARROW_VOTES})
    kernels: Mapping[str, Callable[..., object]] = field(factory=dict, repr=False)


def build(isa: str | None = None) -> KernelBackend:
    """The backend for ``isa``, or for the one that ``ARB_TERNARY_CPU_ISA`` or the processor chooses.

    Raises:
        UsageProblem, EnvironmentProblem: the instruction set is unknown, or cannot be used here.
    """
    chosen = chosen_isa(isa)
    index = _native.isa_index(chosen)
    return CpuBackend(chosen, kernels={**products.kernels(index), **votes.kernels(index)})
