"""The torch backend: the executable specification of the number format and its updates.

It runs on any device that torch serves. Every kernel is a plain function; other backends have the
same signatures. ``M``, ``K``, ``N``, ``G`` and ``J`` are those of
:mod:`arb_ternary.backends.protocol`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from attrs import field, frozen
from torch import Tensor

from arb_ternary.backends import layout
from arb_ternary.backends import reference_scaled_votes as _scaled
from arb_ternary.backends import reference_votes as _votes
from arb_ternary.backends.decode_cache import CACHE, Decoded
from arb_ternary.backends.integer import INT8_SPREAD, int_matmul, shifted_weight_product
from arb_ternary.backends.layout import power_of_two, spread_over_columns
from arb_ternary.backends.protocol import (
    NARROW_NOISE,
    NARROW_VOTES,
    ROW_SHARDS,
    KernelBackend,
    WeightShape,
)

pack_votes = layout.pack_votes
unpack_votes = layout.unpack_votes


def pack(trits_NK: Tensor) -> Tensor:
    """Pack int8 trits ``[N, K]`` into the layout of the backend (uint8)."""
    return layout.pack_trits(trits_NK)


def unpack(packed: Tensor, shape: WeightShape) -> Tensor:
    """Unpack the layout of the backend to int8 trits ``[N, K]``."""
    return layout.unpack_trits(packed, shape.in_features)


def dense_weight(
    packed: Tensor, exponent: Tensor, shape: WeightShape, dtype: torch.dtype
) -> Tensor:
    """``T * 2**E`` in a float dtype, ``[N, K]``; exact in float32 and bfloat16."""
    scale = spread_over_columns(power_of_two(exponent), shape)
    return (unpack(packed, shape) * scale).to(dtype)


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to int8 by their absolute maximum; return ``q`` and ``s`` (float32 ``[M]``).

    ``s = max|x| / 127``; ``q = round_half_even(x / s)``, both in float32 with IEEE division. A row
    of zeros (or one so small that ``s`` underflows) gives ``q = 0, s = 0``. A row with a non-finite
    value gives a non-finite scale, so that the fault reaches the loss; its non-finite entries get
    ``q = 0``.
    """
    x = x_MK.to(torch.float32)
    if x.shape[1] == 0:
        return x.to(torch.int8), x.new_zeros(x.shape[0])
    scale_M = _votes.divided(x.abs().amax(dim=1), 127.0)
    divisor_M = torch.where(scale_M == 0, torch.inf, scale_M)
    quotient = x / divisor_M.unsqueeze(1)
    if _votes.may_be(~torch.isfinite(scale_M).all()):
        quotient.nan_to_num_(0.0, 0.0, 0.0)
    return quotient.round_().to(torch.int8), scale_M


def rms_norm_quantize(x_MK: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x * rsqrt(mean(x**2) + eps)`` in float32 (RMSNorm without gain), then quantised rows."""
    x = x_MK.to(torch.float32)
    mean_square = x.square().mean(dim=1, keepdim=True)
    return quantize_rows(x * torch.rsqrt(mean_square + eps))


def _linear_int8(
    q_MK: Tensor, packed: Tensor, exponent: Tensor, shape: WeightShape
) -> tuple[Tensor, Tensor]:
    """Exact sums ``[M, N]`` in units of ``2**floor_N``."""
    decoded = CACHE.get(packed, exponent)
    if decoded is None:
        wide = exponent.to(torch.int32)
        floor_N = wide.amin(dim=1)
        shift_NJ = wide - floor_N.unsqueeze(1)
        trits = unpack(packed, shape)
        # The host waits for the device here, once after each change of the exponents.
        spread = int(shift_NJ.amax())
        if spread > INT8_SPREAD:
            shift_KN = spread_over_columns(shift_NJ, shape).t()
            return shifted_weight_product(q_MK, trits.t(), shift_KN), floor_N
        if spread:
            trits = trits << spread_over_columns(shift_NJ.to(torch.int8), shape)
        decoded = Decoded(trits, floor_N)
        CACHE.put(packed, exponent, decoded)
    return int_matmul(q_MK, decoded.codes.t(), 127 << INT8_SPREAD), decoded.floor


def linear(
    x_MK: Tensor,
    scale_M: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    bias_N: Tensor | None,
    shape: WeightShape,
    dtype: torch.dtype,
) -> Tensor:
    """``x @ W.T + bias``.

    Args:
        x_MK: float rows, or int8 rows with ``scale_M``.
        scale_M: float32 scales of int8 rows; None selects the float mode.
        packed: weight in the backend's layout.
        exponent: int8 ``[N, J]``.
        bias_N: float32, added last.
        shape: shape of the weight.
        dtype: dtype of the result, ``[M, N]``.

    In int8 mode ``y = float32(sum_g acc_g << (E_g - Emin)) * (scale * 2**Emin)``: the sum is an
    exact integer, converted once, so the result does not depend on the order of summation.

    Raises:
        ValueError: exponents of a row spread over more than 40, in int8 mode; 64 bits would not
            hold the sum for K = 2**16.
    """
    if scale_M is None:
        weight = dense_weight(packed, exponent, shape, x_MK.dtype)
        y = torch.nn.functional.linear(x_MK, weight).to(dtype)
        return y if bias_N is None else y + bias_N.to(dtype)
    if 0 in (shape.out_features, shape.in_features):
        y = scale_M.new_zeros(scale_M.shape[0], shape.out_features)
    else:
        sums, floor_N = _linear_int8(x_MK, packed, exponent, shape)
        y = sums.to(torch.float32)
        y = y.mul_(scale_M.unsqueeze(1)).mul_(power_of_two(floor_N))
    if bias_N is not None:
        y += bias_N
    return y.to(dtype)


def linear_grad_input(
    grad_MN: Tensor,
    scale: Tensor | None,
    packed: Tensor,
    exponent: Tensor,
    shape: WeightShape,
    dtype: torch.dtype,
) -> Tensor:
    """``grad_y @ W`` from the packed weight: ``[M, K]`` in ``dtype``; arguments as in
    :func:`linear`.

    The gradient is float, or int8 with ``scale``, its power of two (float32 scalar); then the sum
    over N is taken exactly in units of the smallest exponent of each column group.

    Raises:
        ValueError: exponents of a column group spread over more than 40, in int8 mode.
    """
    if scale is None:
        return (grad_MN @ dense_weight(packed, exponent, shape, grad_MN.dtype)).to(dtype)
    if 0 in (shape.out_features, shape.in_features):
        return torch.zeros(grad_MN.shape[0], shape.in_features, dtype=dtype, device=grad_MN.device)
    wide = exponent.to(torch.int32)
    floor_J = wide.amin(dim=0, keepdim=True)
    shift_NK = spread_over_columns(wide - floor_J, shape)
    sums = shifted_weight_product(grad_MN, unpack(packed, shape), shift_NK)
    floor_K = spread_over_columns(power_of_two(floor_J), shape)
    return sums.to(torch.float32).mul_(scale).mul_(floor_K).to(dtype)


def embedding(
    ids_M: Tensor, packed: Tensor, exponent: Tensor, shape: WeightShape, dtype: torch.dtype
) -> Tensor:
    """Rows ``W[ids]``, ``[M, K]``; only the requested rows are decoded.

    Raises:
        IndexError: an id is outside ``0 .. N - 1``. On a GPU ``index_select`` asserts it on the
            device, and the host does not wait.
    """
    rows = WeightShape(ids_M.shape[0], shape.in_features, shape.group_size)
    packed_rows = packed.index_select(0, ids_M)
    exponent_rows = exponent.index_select(0, ids_M)
    return dense_weight(packed_rows, exponent_rows, rows, dtype)


#: The kernels by op name: every required and every optional op.
KERNELS: Final[Mapping[str, Callable[..., Any]]] = {
    "pack": pack,
    "unpack": unpack,
    "pack_votes": pack_votes,
    "unpack_votes": unpack_votes,
    "quantize_rows": quantize_rows,
    "rms_norm_quantize": rms_norm_quantize,
    "quantize_gradient": _votes.quantize_gradient,
    "linear": linear,
    "linear_grad_input": linear_grad_input,
    "embedding": embedding,
    "cast_votes": _votes.cast_votes,
    "embedding_votes": _votes.embedding_votes,
    "apply_votes": _votes.apply_votes,
    "apply_exponent_votes": _votes.apply_exponent_votes,
    "cast_scaled_votes": _scaled.cast_scaled_votes,
    "embedding_scaled_votes": _scaled.embedding_scaled_votes,
    "apply_scaled_votes": _scaled.apply_scaled_votes,
}


@frozen
class TorchBackend:
    """The reference backend: always available, and correct on every device."""

    name: str = "torch"
    capabilities: frozenset[str] = frozenset({NARROW_NOISE, NARROW_VOTES, ROW_SHARDS})
    kernels: Mapping[str, Callable[..., object]] = field(default=KERNELS, repr=False)


def build() -> KernelBackend:
    """Return the backend; the target of its spec."""
    return TorchBackend()
