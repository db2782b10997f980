"""Quantise rows of activations, with or without a norm before them, and gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from arb_ternary_triton.kernels.common import (
    both,
    draw,
    draw_at,
    flat_index,
    floor_of,
    power_of_two,
    wide_indices,
)

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
def _find_largest(value_C):
    """Return the bits of ``max|g|`` of a part; NaN counts as 0."""
    size_C = tl.abs(value_C)
    size_C = tl.where(size_C != size_C, 0.0, size_C)
    return tl.max(size_C, axis=0).to(tl.int32, bitcast=True)


@triton.jit
def largest_kernel(grad, largest, count, CHUNK: tl.constexpr):
    """Find the bits of ``max|g|``; NaN counts as 0.

    The bits of non-negative floats are ordered like the floats.
    """
    index_C = wide_indices(0, CHUNK)
    value_C = tl.load(grad + index_C, mask=index_C < count, other=0.0)
    tl.atomic_max(largest, _find_largest(value_C.to(tl.float32)))


@triton.jit
def _unit(bits):
    """Return whether a largest value can be scaled, and the power of two that does so.

    It is the smallest power of two for which ``max|g| <= 127 * unit``.
    """
    usable = (bits > 0) & (bits < INFINITY_BITS)
    # max = m * 2**L with m in [1, 2). 127 * 2**(L - 6) holds it up to m = 127/64, whose mantissa is
    # 0x7E0000.
    exponent = (bits >> 23) - 127 - 6
    too_large = (bits & 0x7FFFFF) > 0x7E0000
    exponent = exponent + too_large.to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -126), 127)
    return usable, tl.where(usable, power_of_two(exponent), 1.0)


@triton.jit
def _rounded(loaded_C, usable, unit, hashed_C):
    """Return ``floor(g / unit + u)`` in -127..127; 0 for NaN and without a usable maximum."""
    fine_C = usable & (loaded_C == loaded_C)
    value_C = tl.where(fine_C, loaded_C, 0.0)
    noise_C = (hashed_C >> 8).to(tl.float32) * (2.0**-24)
    divided_C = tl.div_rn(value_C, unit + tl.zeros(value_C.shape, tl.float32))
    rounded_C = floor_of(divided_C + noise_C)
    rounded_C = tl.minimum(tl.maximum(rounded_C, -127), 127)
    return tl.where(fine_C, rounded_C, 0)


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
    """Round ``q = floor(g / scale + u)``; ``largest`` is from :func:`largest_kernel`."""
    usable, unit = _unit(tl.load(largest))
    if tl.program_id(0) == 0:
        tl.store(scale, unit)

    index_C = wide_indices(0, CHUNK)
    inside_C = index_C < count
    loaded_C = tl.load(grad + index_C, mask=inside_C, other=0.0).to(tl.float32)
    hashed_C = draw(index_C.to(tl.uint32), key)
    if WIDE:
        is_low_C = index_C >> 32 == 0
        high_C = draw(index_C.to(tl.uint32), next_key)
        hashed_C = tl.where(is_low_C, hashed_C, high_C)
    rounded_C = _rounded(loaded_C, usable, unit, hashed_C)
    tl.store(q + index_C, rounded_C.to(tl.int8), mask=inside_C)


@triton.jit
def _to_bfloat16(value):
    """Round float32 to the nearest bfloat16, ties to even; the result is float32."""
    bits = value.to(tl.uint32, bitcast=True)
    bits = bits + 0x7FFF + ((bits >> 16) & 1)
    rounded = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(value == value, rounded, value)


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return rows, columns and mask of the program's tile; the tiles of a row are neighbours."""
    tiles_in_row = tl.cdiv(columns, COLUMNS)
    row_R = tl.program_id(0) // tiles_in_row * ROWS + tl.arange(0, ROWS)
    column_C = tl.program_id(0) % tiles_in_row * COLUMNS + tl.arange(0, COLUMNS)
    return row_R, column_C, both(row_R < rows, column_C < columns)


@triton.jit
def _load_both(grad, row_scale, row_R, column_C, inside_RC, rows, columns, BFLOAT16: tl.constexpr):
    """Load a tile of a gradient; return it and the same with the scales of its rows, float32.

    The product with a scale is rounded to the dtype of the gradient. With ``BFLOAT16`` that is done
    by hand, because the interpreter would truncate.
    """
    place_RC = grad + flat_index(row_R, columns, column_C)
    value_RC = tl.load(place_RC, mask=inside_RC, other=0.0).to(tl.float32)
    scale_R = tl.load(row_scale + row_R, mask=row_R < rows, other=0.0)
    if BFLOAT16:
        scale_R = _to_bfloat16(scale_R)
        return value_RC, _to_bfloat16(value_RC * scale_R[:, None])
    kind: tl.constexpr = grad.dtype.element_ty
    scale_R = scale_R.to(kind).to(tl.float32)
    return value_RC, (value_RC * scale_R[:, None]).to(kind).to(tl.float32)


@triton.jit
def _largest_of_both(
    grad,
    row_scale,
    largest,
    rows,
    columns,
    BFLOAT16: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row_R, column_C, inside_RC = _tile(rows, columns, ROWS, COLUMNS)
    value_RC, folded_RC = _load_both(
        grad, row_scale, row_R, column_C, inside_RC, rows, columns, BFLOAT16
    )
    tl.atomic_max(largest, _find_largest(tl.reshape(value_RC, (ROWS * COLUMNS,))))
    folded_C = tl.reshape(tl.where(inside_RC, folded_RC, 0.0), (ROWS * COLUMNS,))
    tl.atomic_max(largest + 1, _find_largest(folded_C))


@triton.jit
def largest_of_both_kernel(
    first,
    second,
    third,
    row_scale,
    largest,
    rows,
    first_columns,
    second_columns,
    third_columns,
    BFLOAT16: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Find the bits of ``max|g|`` of one to three gradients, and with the scales of their rows.

    ``largest`` is ``[count, 2]``. The second axis of the grid is the gradient.
    """
    which = tl.program_id(1)
    if which == 0:
        _largest_of_both(first, row_scale, largest, rows, first_columns, BFLOAT16, ROWS, COLUMNS)
    if which == 1:
        _largest_of_both(
            second, row_scale, largest + 2, rows, second_columns, BFLOAT16, ROWS, COLUMNS
        )
    if which == 2:
        _largest_of_both(
            third, row_scale, largest + 4, rows, third_columns, BFLOAT16, ROWS, COLUMNS
        )


@triton.jit
def _quantize_both(
    grad,
    row_scale,
    largest,
    q,
    scales,
    rows,
    columns,
    key,
    folded_key,
    BFLOAT16: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    usable, unit = _unit(tl.load(largest))
    folded_usable, folded_unit = _unit(tl.load(largest + 1))
    if tl.program_id(0) == 0:
        tl.store(scales, unit)
        tl.store(scales + 1, folded_unit)

    row_R, column_C, inside_RC = _tile(rows, columns, ROWS, COLUMNS)
    value_RC, folded_RC = _load_both(
        grad, row_scale, row_R, column_C, inside_RC, rows, columns, BFLOAT16
    )
    row_R1 = row_R[:, None]
    column_1C = column_C[None, :]
    place_RC = flat_index(row_R, columns, column_C)
    hashed_RC = draw_at(row_R1, column_1C, columns, key, key, False)
    rounded_RC = _rounded(value_RC, usable, unit, hashed_RC)
    tl.store(q + place_RC, rounded_RC.to(tl.int8), mask=inside_RC)
    hashed_RC = draw_at(row_R1, column_1C, columns, folded_key, folded_key, False)
    rounded_RC = _rounded(folded_RC, folded_usable, folded_unit, hashed_RC)
    folded_q = q + tl.cast(rows, tl.int64) * columns
    tl.store(folded_q + place_RC, rounded_RC.to(tl.int8), mask=inside_RC)


@triton.jit(
    do_not_specialize=["key", "second_key", "third_key", "folded", "second_folded", "third_folded"]
)
def quantize_both_kernel(
    first,
    second,
    third,
    row_scale,
    largest,
    first_q,
    second_q,
    third_q,
    scales,
    rows,
    first_columns,
    second_columns,
    third_columns,
    key,
    second_key,
    third_key,
    folded,
    second_folded,
    third_folded,
    BFLOAT16: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Round one to three gradients, and each with the scales of its rows: ``q [2, M, N]``."""
    which = tl.program_id(1)
    if which == 0:
        _quantize_both(
            first,
            row_scale,
            largest,
            first_q,
            scales,
            rows,
            first_columns,
            key,
            folded,
            BFLOAT16,
            ROWS,
            COLUMNS,
        )
    if which == 1:
        _quantize_both(
            second,
            row_scale,
            largest + 2,
            second_q,
            scales + 2,
            rows,
            second_columns,
            second_key,
            second_folded,
            BFLOAT16,
            ROWS,
            COLUMNS,
        )
    if which == 2:
        _quantize_both(
            third,
            row_scale,
            largest + 4,
            third_q,
            scales + 4,
            rows,
            third_columns,
            third_key,
            third_folded,
            BFLOAT16,
            ROWS,
            COLUMNS,
        )
