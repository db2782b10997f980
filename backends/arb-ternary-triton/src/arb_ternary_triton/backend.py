"""The backend: its name, capabilities and kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import field, frozen

from arb_ternary.backends.protocol import (
    FUSED_VOTES,
    NARROW_NOISE,
    NARROW_VOTES,
    ROW_SHARDS,
    KernelBackend,
)
from arb_ternary_triton import casting, flips, layout, products, rows, wire


@frozen
class TritonBackend:
    """The Triton backend, compiled or interpreted as Triton was imported."""

    name: str = "triton"
    capabilities: frozenset[str] = frozenset({FUSED_VOTES, NARROW_NOISE, NARROW_VOTES, ROW_SHARDS})
    kernels: Mapping[str, Callable[..., object]] = field(factory=dict, repr=False)


def build() -> KernelBackend:
    """Build the backend, with every required and optional op and the ops between ranks."""
    return TritonBackend(
        kernels={
            "pack": layout.pack,
            "unpack": layout.unpack,
            "pack_votes": layout.pack_votes,
            "unpack_votes": layout.unpack_votes,
            "quantize_rows": rows.quantize_rows,
            "rms_norm_quantize": rows.rms_norm_quantize,
            "quantize_gradient": rows.quantize_gradient,
            "quantize_gradients": rows.quantize_gradients,
            "quantize_several": rows.quantize_several,
            "linear": products.linear,
            "linear_grad_input": products.linear_grad_input,
            "embedding": products.embedding,
            "cast_votes": casting.cast_votes,
            "cast_scaled_votes": casting.cast_scaled_votes,
            "embedding_votes": casting.embedding_votes,
            "embedding_scaled_votes": casting.embedding_scaled_votes,
            "apply_votes": flips.apply_votes,
            "apply_scaled_votes": flips.apply_scaled_votes,
            "apply_exponent_votes": flips.apply_exponent_votes,
            "apply_together": flips.apply_together,
            "distributed.digits_to_bytes": wire.digits_to_bytes,
            "distributed.add_digits_": wire.add_digits_,
            "distributed.weight_rows": wire.weight_rows,
            "distributed.flip_list": wire.flip_list,
            "distributed.apply_flips_": wire.apply_flips_,
            "votes.sums_to_quanta": wire.sums_to_quanta,
        }
    )
