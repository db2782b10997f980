"""Votes cast from a tile of the gradient that never leaves the chip.

A program forms the gradient of some rows and columns of the weight, by a product or by summing
looked-up rows, turns it into votes, and subtracts them from the accumulators. Sums over rows, over
columns and over groups are left as partial sums of the tile: a second kernel adds them in a fixed
order, so that no result depends on which program came first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from arb_ternary_triton.kernels.common import draw_at, floor_of, load_trits, load_votes, store_votes


@triton.jit
def _scale_exponent(scale):
    """``e`` of a normal float32 ``2**e``."""
    return (tl.load(scale).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _float_votes(
    g, scale, row_R, column_C, in_rows, in_columns, vote_scale, rows, limit, noise_shift, bits,
    HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """``floor(clip((g * row) * column, -limit / 256, limit / 256) + u)`` in int32; ``u`` is as
    narrow as asked for.
    """
    p = g.to(tl.float32)
    if HAS_SCALE:
        p = p * tl.load(scale)
    p = p * tl.load(vote_scale + row_R, mask=in_rows, other=0.0)[:, None]
    p = p * tl.load(vote_scale + rows + column_C, mask=in_columns, other=0.0)[None, :]
    p = tl.where(p != p, 0.0, p)
    largest = limit.to(tl.float32) * (1.0 / 256)
    p = tl.minimum(tl.maximum(p, -largest), largest)
    narrowed = noise_shift.to(tl.uint32)
    noise = (bits >> (8 + narrowed)).to(tl.int32) + (((1 << 24) - (1 << (24 - noise_shift))) >> 1)
    return floor_of(p + noise.to(tl.float32) * (2.0**-24))


@triton.jit
def _integer_votes(g, scale, row_R, column_C, in_rows, in_columns, vote_scale, rows, limit, bits):
    """The vote as a stochastic shift to the right, in 64 bits."""
    row = tl.load(vote_scale + row_R, mask=in_rows, other=0).to(tl.int64)
    column = tl.load(vote_scale + rows + column_C, mask=in_columns, other=0).to(tl.int64)
    shift = row[:, None] + column[None, :] - _scale_exponent(scale)
    right = tl.minimum(tl.maximum(shift, 0), 31)
    left = tl.minimum(tl.maximum(-shift, 0), 16)
    bound = (limit.to(tl.int64) << right) >> 8
    value = tl.minimum(tl.maximum(g.to(tl.int64) << left, -bound), bound)
    noise = bits.to(tl.int64) & ((1 << right) - 1)
    return ((value + noise) >> right).to(tl.int32)


@triton.jit
def _group_scores(score, product_RC, row_R, in_rows, first, columns, units, UNIT: tl.constexpr):
    """Sums over ``UNIT`` columns to int32 ``score[R, units]``."""
    rows: tl.constexpr = product_RC.shape[0]
    count: tl.constexpr = product_RC.shape[1] // UNIT
    sums = tl.sum(tl.reshape(product_RC, (rows, count, UNIT)), axis=2)
    unit_U = first // UNIT + tl.arange(0, count)
    place = row_R.to(tl.int64)[:, None] * units + unit_U[None, :]
    tl.store(score + place, sums, mask=in_rows[:, None] & (unit_U < units)[None, :])


@triton.jit
def _cast(
    g, place_R, row_R, in_rows, first, scale, packed, votes, score, bad, squares, sizes, vote_scale,
    held, rows, columns, row_bytes, vote_width, units, limit, noise_shift, key, next_key,
    MODE: tl.constexpr, BITS: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_SCALE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Votes of the gradient tile ``g``.

    Args:
        g: float32, int32 or int64 ``[R, C]``; 0 out of range.
        place_R: position of a row among those that are voted on, for partial sums.
        row_R: the row of the weight.
        held: rows that are voted on.
        bad: int32 counter of NaN gradients.
        squares: float32 partial sums of squares: ``[column tiles, held]``, then ``[row tiles, K]``.
        sizes: likewise of absolute values, in int64 for integers.
        MODE: 0 for sign votes, 1 for votes by factors, 2 for votes by shifts.
        UNIT: columns of a partial score; 0 when exponents do not learn.
    """
    column_C = first + tl.arange(0, g.shape[1])
    in_columns = column_C < columns
    inside = in_rows[:, None] & in_columns[None, :]
    if g.dtype.is_floating():
        nan = inside & (g != g)
        count = tl.sum(tl.sum(nan.to(tl.int32), axis=1), axis=0)
        tl.atomic_add(bad, count, mask=count > 0)
        g = tl.where(nan, 0.0, g)
    g = tl.where(inside, g, 0)
    # Partial sums of this tile.
    row_part = squares + tl.program_id(1).to(tl.int64) * held
    column_part = (
        squares + tl.num_programs(1).to(tl.int64) * held + tl.program_id(0).to(tl.int64) * columns
    )
    wide = g.to(tl.float32)
    tl.store(row_part + place_R, tl.sum(wide * wide, axis=1), mask=in_rows)
    tl.store(column_part + column_C, tl.sum(wide * wide, axis=0), mask=in_columns)
    if MODE > 0:
        row_part = sizes + tl.program_id(1).to(tl.int64) * held
        column_part = (
            sizes + tl.num_programs(1).to(tl.int64) * held + tl.program_id(0).to(tl.int64) * columns
        )
        size = tl.abs(g)
        if not g.dtype.is_floating():
            size = size.to(tl.int64)
        tl.store(row_part + place_R, tl.sum(size, axis=1), mask=in_rows)
        tl.store(column_part + column_C, tl.sum(size, axis=0), mask=in_columns)
    if MODE == 0:
        v = (g > 0).to(tl.int32) - (g < 0).to(tl.int32)
    else:
        bits = draw_at(row_R[:, None], column_C[None, :], columns, key, next_key, WIDE)
        if MODE == 1:
            v = _float_votes(
                g,
                scale,
                row_R,
                column_C,
                in_rows,
                in_columns,
                vote_scale,
                rows,
                limit,
                noise_shift,
                bits,
                HAS_SCALE,
            )
        else:
            v = _integer_votes(
                g, scale, row_R, column_C, in_rows, in_columns, vote_scale, rows, limit, bits
            )
        v = tl.where(inside, v, 0)
    if UNIT > 0:
        trit = load_trits(packed, row_R, column_C, in_rows, row_bytes)
        _group_scores(score, v * trit, place_R, in_rows, first, columns, units, UNIT)
    a = load_votes(votes, row_R, column_C, in_rows, columns, vote_width, BITS) - v
    a = tl.minimum(tl.maximum(a, SMALLEST), LARGEST)
    store_votes(votes, a, row_R, first, in_rows, columns, vote_width, BITS)


@triton.jit(do_not_specialize=["limit", "noise_shift", "key", "next_key"])
def product_votes_kernel(
    grad, x, scale, packed, votes, score, bad, squares, sizes, vote_scale,
    terms, rows, columns, row_bytes, vote_width, units, limit, noise_shift, key, next_key,
    MODE: tl.constexpr, INT8: tl.constexpr, LONG: tl.constexpr, BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr, UNIT: tl.constexpr, HAS_SCALE: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """``g = grad.T @ x`` of a tile, from ``grad [N, M]`` and ``x [K, M]`` in int8 mode, else ``[M,
    N]`` and ``[M, K]``.

    Tensor cores take int8 operands only with the summed dimension innermost. ``LONG``: 32 bits
    could overflow.
    """
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * COLUMNS
    column_C = first + tl.arange(0, COLUMNS)
    in_rows = row_R < rows
    in_columns = column_C < columns
    if INT8:
        acc = tl.zeros((ROWS, COLUMNS), tl.int64 if LONG else tl.int32)
    else:
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, terms, TERMS):
        term_M = start + tl.arange(0, TERMS)
        in_terms = term_M < terms
        if INT8:
            left = tl.load(
                grad + row_R.to(tl.int64)[:, None] * terms + term_M[None, :],
                mask=in_rows[:, None] & in_terms[None, :], other=0,
            )  # fmt: skip
            right = tl.load(
                x + column_C.to(tl.int64)[:, None] * terms + term_M[None, :],
                mask=in_columns[:, None] & in_terms[None, :], other=0,
            )  # fmt: skip
            if LONG:
                acc += tl.dot(left, tl.trans(right), out_dtype=tl.int32).to(tl.int64)
            else:
                acc = tl.dot(left, tl.trans(right), acc, out_dtype=tl.int32)
        else:
            left = tl.load(
                grad + term_M.to(tl.int64)[:, None] * rows + row_R[None, :],
                mask=in_terms[:, None] & in_rows[None, :], other=0,
            )  # fmt: skip
            right = tl.load(
                x + term_M.to(tl.int64)[:, None] * columns + column_C[None, :],
                mask=in_terms[:, None] & in_columns[None, :], other=0,
            )  # fmt: skip
            acc = tl.dot(tl.trans(left), right, acc, input_precision="ieee")
    _cast(
        acc, row_R, row_R, in_rows, first, scale, packed, votes, score, bad, squares, sizes,
        vote_scale,
        rows, rows, columns, row_bytes, vote_width, units, limit, noise_shift, key, next_key,
        MODE, BITS, LARGEST, SMALLEST, UNIT, HAS_SCALE, WIDE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["held", "limit", "noise_shift", "key", "next_key"])
def lookup_votes_kernel(
    grad, order, starts, distinct, scale, packed, votes, score, bad, squares, sizes, vote_scale,
    held, rows, columns, row_bytes, vote_width, units, limit, noise_shift, key, next_key,
    MODE: tl.constexpr, INT8: tl.constexpr, BITS: tl.constexpr, LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr, UNIT: tl.constexpr, HAS_SCALE: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``g`` of the distinct looked-up rows: ``order[starts[u] : starts[u + 1]]`` are the gradient
    rows of the ``u``-th.

    They are summed in that order, whatever the tile.
    """
    place_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * COLUMNS
    column_C = first + tl.arange(0, COLUMNS)
    in_rows = place_R < held
    row_R = tl.load(distinct + place_R, mask=in_rows, other=0)
    start_R = tl.load(starts + place_R, mask=in_rows, other=0)
    count_R = tl.load(starts + place_R + 1, mask=in_rows, other=0) - start_R
    g = tl.zeros((ROWS, COLUMNS), tl.int32 if INT8 else tl.float32)
    for turn in range(0, tl.max(count_R, axis=0)):
        more = in_rows & (turn < count_R)
        term_R = tl.load(order + start_R + turn, mask=more, other=0)
        inside = more[:, None] & (column_C < columns)[None, :]
        g += tl.load(grad + term_R[:, None] * columns + column_C[None, :], mask=inside, other=0).to(
            g.dtype
        )
    _cast(
        g, place_R, row_R, in_rows, first, scale, packed, votes, score, bad, squares, sizes,
        vote_scale,
        held, rows, columns, row_bytes, vote_width, units, limit, noise_shift, key, next_key,
        MODE, BITS, LARGEST, SMALLEST, UNIT, HAS_SCALE, WIDE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["held"])
def settle_sums_kernel(
    part, target, scale, row_of, held, rows, columns, row_parts, column_parts,
    INDEXED: tl.constexpr, HAS_SCALE: tl.constexpr, SQUARE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Add partial sums, in their order, to ``target [N + K]``: rows, then columns."""
    of_rows = tl.program_id(1) == 0
    index_C = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    count = tl.where(of_rows, held, columns)
    inside = index_C < count
    base = part + tl.where(of_rows, 0, tl.cast(row_parts, tl.int64) * held)
    total = tl.zeros((CHUNK,), part.dtype.element_ty)
    for turn in range(0, tl.where(of_rows, row_parts, column_parts)):
        total += tl.load(base + tl.cast(turn, tl.int64) * count + index_C, mask=inside, other=0)
    value = total.to(tl.float32)
    if HAS_SCALE:
        unit = tl.load(scale)
        value = value * (unit * unit if SQUARE else unit)
    place = index_C.to(tl.int64)
    if INDEXED:
        place = tl.where(
            of_rows,
            tl.load(row_of + index_C, mask=index_C < tl.where(of_rows, held, 0), other=0),
            place,
        )
    place += tl.where(of_rows, 0, rows)
    tl.store(target + place, tl.load(target + place, mask=inside, other=0.0) + value, mask=inside)


@triton.jit
def _score(score, place, unit_of, inside, units, A_GROUP: tl.constexpr):
    """The score of a group from its units: ``A_GROUP`` each, all of a row for 0."""
    total = tl.zeros(place.shape, tl.int32)
    for turn in range(0, A_GROUP if A_GROUP > 0 else units):
        unit = unit_of + turn
        total += tl.load(
            score + place.to(tl.int64) * units + unit, mask=inside & (unit < units), other=0
        )
    return total


@triton.jit(do_not_specialize=["held", "exponent_shift", "key", "next_key"])
def settle_exponents_kernel(
    score, exponent_votes, row_of, held, groups, units, exponent_shift, key, next_key,
    INDEXED: tl.constexpr, SCALED: tl.constexpr, WIDE: tl.constexpr, A_GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Votes for exponents: the sign of a group's score, or the score shifted stochastically."""
    index_C = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = index_C < held * groups
    place = index_C // groups
    group = index_C % groups
    total = _score(score, place, group * A_GROUP, inside, units, A_GROUP)
    row = tl.load(row_of + place, mask=inside, other=0) if INDEXED else place.to(tl.int64)
    at = exponent_votes + row * groups + group
    b = tl.load(at, mask=inside, other=0).to(tl.int64)
    if SCALED:
        bits = draw_at(row, group, groups, key, next_key, WIDE).to(tl.int64)
        noise = bits & ((tl.cast(1, tl.int64) << exponent_shift) - 1)
        b = b - ((total.to(tl.int64) + noise) >> exponent_shift)
        b = tl.minimum(tl.maximum(b, -127), 127)
    else:
        b = b - ((total > 0).to(tl.int64) - (total < 0).to(tl.int64))
        b = tl.minimum(tl.maximum(b, -128), 127)
    tl.store(at, b.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["held"])
def settle_correlation_kernel(
    score,
    correlation,
    steps,
    row_of,
    held,
    groups,
    units,
    A_GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add scores to the correlation and count the update, both saturating."""
    index_C = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = index_C < held * groups
    place = index_C // groups
    group = index_C % groups
    total = _score(score, place, group * A_GROUP, inside, units, A_GROUP)
    at = tl.load(row_of + place, mask=inside, other=0) * groups + group
    moved = tl.load(correlation + at, mask=inside, other=0).to(tl.int32) + total
    tl.store(
        correlation + at, tl.minimum(tl.maximum(moved, -32768), 32767).to(tl.int16), mask=inside
    )
    counted = tl.load(steps + at, mask=inside, other=0)
    tl.store(steps + at, tl.where(counted == 2147483647, counted, counted + 1), mask=inside)
