"""The backend: its name, its capabilities and its kernels."""

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
    """Build the TileLang backend with every required and optional op."""
    kernels: dict[str, Callable[..., object]] = {}
    for module in (products, storage, casting, lookups, flipping):
        kernels.update(module.kernels())
    return TileLangBackend(kernels=kernels)
