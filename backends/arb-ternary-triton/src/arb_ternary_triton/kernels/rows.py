"""Kernels that quantise: rows of activations, with or without a norm before them, and gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from arb_ternary_triton.kernels.common import draw, floor_of, power_of_two

# : 1.5 * 2**23: adding and subtracting it rounds a float32 below 2**22 to the nearest integer, ties
# to even.
ROUNDER = tl.constexpr(12582912.0)
INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _load(x, row_R, in_rows, first, columns, CHUNK: tl.constexpr):
    column_C = first + tl.arange(0, CHUNK)
    inside = in_rows[:, None] & (column_C < columns)[None, :]
    return tl.load(x + row_R[:, None] * columns + column_C[None, :], mask=inside, other=0.0).to(
        tl.float32
    )


@triton.jit
def quantize_rows_kernel(
    x, q, scale, rows, columns, eps, NORM: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr
):
    """Some rows a program: ``s = max|x| / 127``, ``q = round_half_even(x / s)``; with ``NORM`` of
    normalised rows.
    """
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = row_R < rows
    factor_R = tl.full((ROWS,), 1.0, tl.float32)
    if NORM:
        total = tl.zeros((ROWS, CHUNK), tl.float32)
        for first in range(0, columns, CHUNK):
            value = _load(x, row_R, in_rows, first, columns, CHUNK)
            total += value * value
        mean_R = tl.div_rn(tl.sum(total, axis=1), factor_R * tl.cast(columns, tl.float32))
        factor_R = tl.div_rn(factor_R, tl.sqrt_rn(mean_R + eps))
    largest = tl.zeros((ROWS, CHUNK), tl.float32)
    bad = tl.zeros((ROWS, CHUNK), tl.int32)
    for first in range(0, columns, CHUNK):
        value = _load(x, row_R, in_rows, first, columns, CHUNK) * factor_R[:, None]
        # A maximum drops NaN: it is noted beside it.
        bad |= (value != value).to(tl.int32)
        largest = tl.maximum(largest, tl.abs(value))
    s_R = tl.div_rn(tl.max(largest, axis=1), tl.full((ROWS,), 127.0, tl.float32))
    s_R = tl.where(tl.max(bad, axis=1) > 0, float("nan"), s_R)
    tl.store(scale + row_R, s_R, mask=in_rows)
    usable_R = (s_R > 0.0) & (s_R < float("inf"))
    divisor_R = tl.where(usable_R, s_R, 1.0)
    for first in range(0, columns, CHUNK):
        value = _load(x, row_R, in_rows, first, columns, CHUNK) * factor_R[:, None]
        value = tl.where(usable_R[:, None], value, 0.0)
        rounded = (
            tl.div_rn(value, tl.broadcast_to(divisor_R[:, None], value.shape)) + ROUNDER
        ) - ROUNDER
        column_C = first + tl.arange(0, CHUNK)
        inside = in_rows[:, None] & (column_C < columns)[None, :]
        tl.store(q + row_R[:, None] * columns + column_C[None, :], rounded.to(tl.int8), mask=inside)


@triton.jit
def largest_kernel(grad, largest, count, CHUNK: tl.constexpr):
    """The bits of ``max|g|``, by which non-negative floats are ordered like integers; NaN counts as
    0.
    """
    index_C = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    value = tl.abs(tl.load(grad + index_C, mask=index_C < count, other=0.0).to(tl.float32))
    value = tl.where(value != value, 0.0, value)
    tl.atomic_max(largest, tl.max(value, axis=0).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["key", "next_key"])
def quantize_gradient_kernel(
    grad, largest, q, scale, count, key, next_key, WIDE: tl.constexpr, CHUNK: tl.constexpr
):
    """``q = floor(g / scale + u)`` with the smallest power of two for which ``max|g| <= 127 *
    scale``.
    """
    bits = tl.load(largest)
    usable = (bits > 0) & (bits < INFINITY_BITS)
    # max = m * 2**L with m in [1, 2): 127 * 2**(L - 6) holds it up to m = 127/64, whose mantissa is
    # 0x7E0000.
    exponent = (bits >> 23) - 127 - 6 + ((bits & 0x7FFFFF) > 0x7E0000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -126), 127)
    s = tl.where(usable, power_of_two(exponent), 1.0)
    if tl.program_id(0) == 0:
        tl.store(scale, s)
    index_C = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = index_C < count
    value = tl.load(grad + index_C, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(usable & (value == value), value, 0.0)
    hashed = draw(index_C.to(tl.uint32), key)
    if WIDE:
        hashed = tl.where(index_C >> 32 == 0, hashed, draw(index_C.to(tl.uint32), next_key))
    noise = (hashed >> 8).to(tl.float32) * (2.0**-24)
    rounded = floor_of(tl.div_rn(value, s + tl.zeros((CHUNK,), tl.float32)) + noise)
    rounded = tl.minimum(tl.maximum(rounded, -127), 127)
    # A NaN, like a gradient without a usable maximum, gives 0 and not the rounding of the noise.
    fine = usable & (tl.load(grad + index_C, mask=inside, other=0.0).to(tl.float32) == value)
    tl.store(q + index_C, tl.where(fine, rounded, 0).to(tl.int8), mask=inside)
