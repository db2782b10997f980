"""The backend: its name, what it promises, and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import field, frozen

from arb_ternary.backends.protocol import FUSED_VOTES, NARROW_NOISE, NARROW_VOTES, KernelBackend
from arb_ternary_tilelang import casting, flipping, lookups, products, storage


@frozen
class TileLangBackend:
    """Kernels that TileLang compiles for the device of their arguments when they are first used."""

    name: str = "tilelang"
    capabilities: frozenset[str] = frozenset({FUSED_VOTES, NARROW_NOISE, NARROW_VOTES})
    kernels: Mapping[str, Callable[..., object]] = field(factory=dict, repr=False)


def build() -> KernelBackend:
    """The TileLang backend with every required and optional op."""
    modules = (products, storage, casting, lookups, flipping)
    return TileLangBackend(
        kernels={op: kernel for module in modules for op, kernel in module.kernels().items()}
    )
