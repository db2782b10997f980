"""Quantise rows of activations, with or without a norm before them, and gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from arb_ternary_triton.kernels.common import both, draw, floor_of, power_of_two, wide_indices

#: 1.5 * 2**23. Adding and subtracting it rounds a float32 below 2**22 to the nearest integer, ties
#: to even.
ROUNDER = tl.constexpr(12582912.0)
INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _load(x, row_R, in_rows, first, columns, CHUNK: tl.constexpr):
    column_C = first + tl.arange(0, CHUNK)
    inside = both(in_rows, column_C < columns)
    place = x + row_R[:, None] * columns + column_C[None, :]
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def quantize_rows_kernel(
    x,
    q,
    scale,
    rows,
    columns,
    eps,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Quantise ``ROWS`` rows per program: ``s = max|x| / 127``, ``q = round_half_even(x / s)``.

    With ``NORM`` the rows are normalised first.
    """
    row_R = wide_indices(0, ROWS)
    in_rows = row_R < rows
    factor_R = tl.full((ROWS,), 1.0, tl.float32)
    if NORM:
        total = tl.zeros((ROWS, CHUNK), tl.float32)
        for first in range(0, columns, CHUNK):
            value = _load(x, row_R, in_rows, first, columns, CHUNK)
            total += value * value
        total_R = tl.sum(total, axis=1)
        columns_R = factor_R * tl.cast(columns, tl.float32)
        mean_R = tl.div_rn(total_R, columns_R)
        factor_R = tl.div_rn(factor_R, tl.sqrt_rn(mean_R + eps))

    largest = tl.zeros((ROWS, CHUNK), tl.float32)
    bad = tl.zeros((ROWS, CHUNK), tl.int32)
    for first in range(0, columns, CHUNK):
        value = _load(x, row_R, in_rows, first, columns, CHUNK)
        value = value * factor_R[:, None]
        # A maximum drops NaN, so NaN is recorded separately.
        bad |= (value != value).to(tl.int32)
        largest = tl.maximum(largest, tl.abs(value))
    largest_R = tl.max(largest, axis=1)
    scale_R = tl.div_rn(largest_R, tl.full((ROWS,), 127.0, tl.float32))
    is_bad_R = tl.max(bad, axis=1) > 0
    scale_R = tl.where(is_bad_R, float("nan"), scale_R)
    tl.store(scale + row_R, scale_R, mask=in_rows)

    usable_R = (scale_R > 0.0) & (scale_R < float("inf"))
    divisor_R = tl.where(usable_R, scale_R, 1.0)
    for first in range(0, columns, CHUNK):
        value = _load(x, row_R, in_rows, first, columns, CHUNK)
        value = value * factor_R[:, None]
        value = tl.where(usable_R[:, None], value, 0.0)
        divisor = tl.broadcast_to(divisor_R[:, None], value.shape)
        shifted = tl.div_rn(value, divisor) + ROUNDER
        rounded = shifted - ROUNDER
        column_C = first + tl.arange(0, CHUNK)
        inside = both(in_rows, column_C < columns)
        place = q + row_R[:, None] * columns + column_C[None, :]
        tl.store(place, rounded.to(tl.int8), mask=inside)


@triton.jit
def largest_kernel(grad, largest, count, CHUNK: tl.constexpr):
    """Find the bits of ``max|g|``; NaN counts as 0.

    The bits of non-negative floats are ordered like the floats.
    """
    index_C = wide_indices(0, CHUNK)
    value = tl.load(grad + index_C, mask=index_C < count, other=0.0)
    value = tl.abs(value.to(tl.float32))
    value = tl.where(value != value, 0.0, value)
    bits = tl.max(value, axis=0).to(tl.int32, bitcast=True)
    tl.atomic_max(largest, bits)


@triton.jit(do_not_specialize=["key", "next_key"])
def quantize_gradient_kernel(
    grad,
    largest,
    q,
    scale,
    count,
    key,
    next_key,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Round ``q = floor(g / scale + u)``.

    ``scale`` is the smallest power of two for which ``max|g| <= 127 * scale``.
    """
    bits = tl.load(largest)
    usable = (bits > 0) & (bits < INFINITY_BITS)
    # max = m * 2**L with m in [1, 2). 127 * 2**(L - 6) holds it up to m = 127/64, whose mantissa is
    # 0x7E0000.
    exponent = (bits >> 23) - 127 - 6
    too_large = (bits & 0x7FFFFF) > 0x7E0000
    exponent = exponent + too_large.to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -126), 127)
    unit = tl.where(usable, power_of_two(exponent), 1.0)
    if tl.program_id(0) == 0:
        tl.store(scale, unit)

    index_C = wide_indices(0, CHUNK)
    inside = index_C < count
    value = tl.load(grad + index_C, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(usable & (value == value), value, 0.0)
    hashed = draw(index_C.to(tl.uint32), key)
    if WIDE:
        is_low = index_C >> 32 == 0
        high = draw(index_C.to(tl.uint32), next_key)
        hashed = tl.where(is_low, hashed, high)
    noise = (hashed >> 8).to(tl.float32) * (2.0**-24)
    divided = tl.div_rn(value, unit + tl.zeros((CHUNK,), tl.float32))
    rounded = floor_of(divided + noise)
    rounded = tl.minimum(tl.maximum(rounded, -127), 127)

    # NaN, and any gradient without a usable maximum, gives 0 and not the rounding of the noise.
    loaded = tl.load(grad + index_C, mask=inside, other=0.0)
    fine = usable & (loaded.to(tl.float32) == value)
    place = q + index_C
    rounded = tl.where(fine, rounded, 0)
    tl.store(place, rounded.to(tl.int8), mask=inside)
