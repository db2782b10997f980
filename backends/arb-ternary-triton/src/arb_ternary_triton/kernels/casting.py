"""Cast votes from a tile of the gradient that never leaves the chip.

A program forms the gradient of some rows and columns of the weight, by a product or by summing
looked-up rows. It turns the gradient into votes and subtracts them from the accumulators. Sums over
rows, columns and groups are stored as partial sums of the tile. A second kernel adds them in a
fixed order, so no result depends on which program came first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from arb_ternary_triton.kernels.common import (
    both,
    draw_at,
    flat_index,
    floor_of,
    indices,
    load_trits,
    load_votes,
    store_votes,
)


@triton.jit
def _scale_exponent(scale):
    """Return ``e`` of a normal float32 ``2**e``."""
    bits = tl.load(scale).to(tl.int32, bitcast=True)
    return (bits >> 23) - 127


@triton.jit
def _float_votes(
    gradient,
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
    HAS_SCALE: tl.constexpr,
):
    """Return ``floor(clip((g * row) * column, -limit / 256, limit / 256) + u)`` in int32.

    ``u`` lies around one half, in an interval of width ``2**-noise_shift``.
    """
    product = gradient.to(tl.float32)
    if HAS_SCALE:
        product = product * tl.load(scale)
    row_factor = tl.load(vote_scale + row_R, mask=in_rows, other=0.0)
    product = product * row_factor[:, None]
    column_factor = tl.load(vote_scale + rows + column_C, mask=in_columns, other=0.0)
    product = product * column_factor[None, :]
    product = tl.where(product != product, 0.0, product)

    largest = limit.to(tl.float32) * (1.0 / 256)
    product = tl.minimum(tl.maximum(product, -largest), largest)

    narrowed = noise_shift.to(tl.uint32)
    drawn = (bits >> (8 + narrowed)).to(tl.int32)
    noise = drawn + (((1 << 24) - (1 << (24 - noise_shift))) >> 1)
    return floor_of(product + noise.to(tl.float32) * (2.0**-24))


@triton.jit
def _integer_votes(
    gradient,
    scale,
    row_R,
    column_C,
    in_rows,
    in_columns,
    vote_scale,
    rows,
    limit,
    bits,
):
    """Return the vote as a stochastic shift to the right, computed in 64 bits."""
    row = tl.load(vote_scale + row_R, mask=in_rows, other=0).to(tl.int64)
    column = tl.load(vote_scale + rows + column_C, mask=in_columns, other=0).to(tl.int64)
    shift = row[:, None] + column[None, :] - _scale_exponent(scale)
    right = tl.minimum(tl.maximum(shift, 0), 31)
    left = tl.minimum(tl.maximum(-shift, 0), 16)

    bound = (limit.to(tl.int64) << right) >> 8
    shifted = gradient.to(tl.int64) << left
    value = tl.minimum(tl.maximum(shifted, -bound), bound)
    noise = bits.to(tl.int64) & ((1 << right) - 1)
    return ((value + noise) >> right).to(tl.int32)


@triton.jit
def _store_scores(
    score,
    product_RC,
    row_R,
    in_rows,
    first,
    columns,
    units,
    UNIT: tl.constexpr,
):
    """Sum over ``UNIT`` columns each and store the sums in int32 ``score[R, units]``."""
    rows: tl.constexpr = product_RC.shape[0]
    count: tl.constexpr = product_RC.shape[1] // UNIT
    by_unit = tl.reshape(product_RC, (rows, count, UNIT))
    sums = tl.sum(by_unit, axis=2)
    unit_U = first // UNIT + tl.arange(0, count)
    place = flat_index(row_R, units, unit_U)
    inside = both(in_rows, unit_U < units)
    tl.store(score + place, sums, mask=inside)


@triton.jit
def _cast(
    gradient,
    place_R,
    row_R,
    in_rows,
    first,
    scale,
    packed,
    votes,
    score,
    bad,
    squares,
    sizes,
    vote_scale,
    voted_rows,
    rows,
    columns,
    row_bytes,
    vote_width,
    units,
    limit,
    noise_shift,
    key,
    next_key,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Cast the votes of a gradient tile.

    Args:
        gradient: float32, int32 or int64 ``[R, C]``; 0 outside the weight.
        place_R: position of each row among the rows that are voted on, for partial sums.
        row_R: row of the weight.
        voted_rows: number of rows that are voted on.
        bad: int32 counter of NaN gradients.
        squares: float32 partial sums of squares: ``[column tiles, voted_rows]``, then ``[row tiles,
            K]``.
        sizes: partial sums of absolute values in the same layout, int64 for integer gradients.
        MODE: 0 for sign votes, 1 for votes by factors, 2 for votes by shifts.
        UNIT: columns of a partial score; 0 if exponents do not learn.
    """
    column_C = first + tl.arange(0, gradient.shape[1])
    in_columns = column_C < columns
    inside = both(in_rows, in_columns)
    if gradient.dtype.is_floating():
        nan = inside & (gradient != gradient)
        nans_by_row = tl.sum(nan.to(tl.int32), axis=1)
        count = tl.sum(nans_by_row, axis=0)
        tl.atomic_add(bad, count, mask=count > 0)
        gradient = tl.where(nan, 0.0, gradient)
    gradient = tl.where(inside, gradient, 0)

    # Partial sums of this tile.
    row_part = squares + tl.program_id(1).to(tl.int64) * voted_rows
    column_parts = squares + tl.num_programs(1).to(tl.int64) * voted_rows
    column_part = column_parts + tl.program_id(0).to(tl.int64) * columns
    wide = gradient.to(tl.float32)
    tl.store(row_part + place_R, tl.sum(wide * wide, axis=1), mask=in_rows)
    tl.store(column_part + column_C, tl.sum(wide * wide, axis=0), mask=in_columns)
    if MODE > 0:
        row_part = sizes + tl.program_id(1).to(tl.int64) * voted_rows
        column_parts = sizes + tl.num_programs(1).to(tl.int64) * voted_rows
        column_part = column_parts + tl.program_id(0).to(tl.int64) * columns
        size = tl.abs(gradient)
        if not gradient.dtype.is_floating():
            size = size.to(tl.int64)
        tl.store(row_part + place_R, tl.sum(size, axis=1), mask=in_rows)
        tl.store(column_part + column_C, tl.sum(size, axis=0), mask=in_columns)

    if MODE == 0:
        vote = (gradient > 0).to(tl.int32) - (gradient < 0).to(tl.int32)
    else:
        bits = draw_at(row_R[:, None], column_C[None, :], columns, key, next_key, WIDE)
        if MODE == 1:
            vote = _float_votes(
                gradient,
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
            vote = _integer_votes(
                gradient,
                scale,
                row_R,
                column_C,
                in_rows,
                in_columns,
                vote_scale,
                rows,
                limit,
                bits,
            )
        vote = tl.where(inside, vote, 0)

    if UNIT > 0:
        trit = load_trits(packed, row_R, column_C, in_rows, row_bytes)
        _store_scores(score, vote * trit, place_R, in_rows, first, columns, units, UNIT)
    held = load_votes(votes, row_R, column_C, in_rows, columns, vote_width, BITS)
    held = held - vote
    held = tl.minimum(tl.maximum(held, SMALLEST), LARGEST)
    store_votes(votes, held, row_R, first, in_rows, columns, vote_width, BITS)


@triton.jit(do_not_specialize=["limit", "noise_shift", "key", "next_key"])
def product_votes_kernel(
    grad,
    x,
    scale,
    packed,
    votes,
    score,
    bad,
    squares,
    sizes,
    vote_scale,
    terms,
    rows,
    columns,
    row_bytes,
    vote_width,
    units,
    limit,
    noise_shift,
    key,
    next_key,
    MODE: tl.constexpr,
    INT8: tl.constexpr,
    LONG: tl.constexpr,
    BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Form ``g = grad.T @ x`` of a tile and cast its votes.

    In int8 mode the operands are ``grad [N, M]`` and ``x [K, M]``, because tensor cores take int8
    operands only if the summed dimension is innermost. Otherwise they are ``[M, N]`` and ``[M,
    K]``. ``LONG`` says that the sum could overflow 32 bits.
    """
    row_R = indices(0, ROWS)
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
            in_left = both(in_rows, in_terms)
            left_place = grad + row_R.to(tl.int64)[:, None] * terms + term_M[None, :]
            left = tl.load(left_place, mask=in_left, other=0)
            in_right = both(in_columns, in_terms)
            right_place = x + column_C.to(tl.int64)[:, None] * terms + term_M[None, :]
            right = tl.load(right_place, mask=in_right, other=0)
            if LONG:
                acc += tl.dot(left, tl.trans(right), out_dtype=tl.int32).to(tl.int64)
            else:
                acc = tl.dot(left, tl.trans(right), acc, out_dtype=tl.int32)
        else:
            in_left = both(in_terms, in_rows)
            left_place = grad + term_M.to(tl.int64)[:, None] * rows + row_R[None, :]
            left = tl.load(left_place, mask=in_left, other=0)
            in_right = both(in_terms, in_columns)
            right_place = x + term_M.to(tl.int64)[:, None] * columns + column_C[None, :]
            right = tl.load(right_place, mask=in_right, other=0)
            acc = tl.dot(tl.trans(left), right, acc, input_precision="ieee")

    _cast(
        acc,
        row_R,
        row_R,
        in_rows,
        first,
        scale,
        packed,
        votes,
        score,
        bad,
        squares,
        sizes,
        vote_scale,
        rows,
        rows,
        columns,
        row_bytes,
        vote_width,
        units,
        limit,
        noise_shift,
        key,
        next_key,
        MODE,
        BITS,
        LARGEST,
        SMALLEST,
        UNIT,
        HAS_SCALE,
        WIDE,
    )


@triton.jit(do_not_specialize=["voted_rows", "limit", "noise_shift", "key", "next_key"])
def lookup_votes_kernel(
    grad,
    order,
    starts,
    distinct,
    scale,
    packed,
    votes,
    score,
    bad,
    squares,
    sizes,
    vote_scale,
    voted_rows,
    rows,
    columns,
    row_bytes,
    vote_width,
    units,
    limit,
    noise_shift,
    key,
    next_key,
    MODE: tl.constexpr,
    INT8: tl.constexpr,
    BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum the gradient of each distinct looked-up row and cast its votes.

    The gradient rows of the ``u``-th distinct row are ``order[starts[u] : starts[u + 1]]``. They
    are summed in that order, whatever the tile.
    """
    place_R = indices(0, ROWS)
    first = tl.program_id(1) * COLUMNS
    column_C = first + tl.arange(0, COLUMNS)
    in_rows = place_R < voted_rows
    row_R = tl.load(distinct + place_R, mask=in_rows, other=0)
    start_R = tl.load(starts + place_R, mask=in_rows, other=0)
    end_R = tl.load(starts + place_R + 1, mask=in_rows, other=0)
    count_R = end_R - start_R

    gradient = tl.zeros((ROWS, COLUMNS), tl.int32 if INT8 else tl.float32)
    for turn in range(0, tl.max(count_R, axis=0)):
        more = in_rows & (turn < count_R)
        term_R = tl.load(order + start_R + turn, mask=more, other=0)
        inside = both(more, column_C < columns)
        place = grad + term_R[:, None] * columns + column_C[None, :]
        gradient += tl.load(place, mask=inside, other=0).to(gradient.dtype)

    _cast(
        gradient,
        place_R,
        row_R,
        in_rows,
        first,
        scale,
        packed,
        votes,
        score,
        bad,
        squares,
        sizes,
        vote_scale,
        voted_rows,
        rows,
        columns,
        row_bytes,
        vote_width,
        units,
        limit,
        noise_shift,
        key,
        next_key,
        MODE,
        BITS,
        LARGEST,
        SMALLEST,
        UNIT,
        HAS_SCALE,
        WIDE,
    )


@triton.jit(do_not_specialize=["voted_rows"])
def settle_sums_kernel(
    part,
    target,
    scale,
    row_of,
    voted_rows,
    rows,
    columns,
    row_parts,
    column_parts,
    INDEXED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SQUARE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add partial sums, in their order, to ``target [N + K]``: rows, then columns."""
    of_rows = tl.program_id(1) == 0
    index_C = indices(0, CHUNK)
    count = tl.where(of_rows, voted_rows, columns)
    inside = index_C < count
    base = part + tl.where(of_rows, 0, tl.cast(row_parts, tl.int64) * voted_rows)
    total = tl.zeros((CHUNK,), part.dtype.element_ty)
    for turn in range(0, tl.where(of_rows, row_parts, column_parts)):
        place = base + tl.cast(turn, tl.int64) * count + index_C
        total += tl.load(place, mask=inside, other=0)

    value = total.to(tl.float32)
    if HAS_SCALE:
        unit = tl.load(scale)
        value = value * (unit * unit if SQUARE else unit)
    element = index_C.to(tl.int64)
    if INDEXED:
        in_index = index_C < tl.where(of_rows, voted_rows, 0)
        row = tl.load(row_of + index_C, mask=in_index, other=0)
        element = tl.where(of_rows, row, element)
    element += tl.where(of_rows, 0, rows)
    before = tl.load(target + element, mask=inside, other=0.0)
    tl.store(target + element, before + value, mask=inside)


@triton.jit
def _score(score, place, first_unit, inside, units, UNITS_PER_GROUP: tl.constexpr):
    """Return the score of a group: the sum of ``UNITS_PER_GROUP`` units, or of all units for 0."""
    total = tl.zeros(place.shape, tl.int32)
    for turn in range(0, UNITS_PER_GROUP if UNITS_PER_GROUP > 0 else units):
        unit = first_unit + turn
        in_units = inside & (unit < units)
        unit_place = score + place.to(tl.int64) * units + unit
        total += tl.load(unit_place, mask=in_units, other=0)
    return total


@triton.jit(do_not_specialize=["voted_rows", "exponent_shift", "key", "next_key"])
def settle_exponents_kernel(
    score,
    exponent_votes,
    row_of,
    voted_rows,
    groups,
    units,
    exponent_shift,
    key,
    next_key,
    INDEXED: tl.constexpr,
    SCALED: tl.constexpr,
    WIDE: tl.constexpr,
    UNITS_PER_GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Vote for exponents by the sign of a group's score, or by the score shifted stochastically."""
    index_C = indices(0, CHUNK)
    inside = index_C < voted_rows * groups
    place = index_C // groups
    group = index_C % groups
    total = _score(score, place, group * UNITS_PER_GROUP, inside, units, UNITS_PER_GROUP)
    if INDEXED:
        row = tl.load(row_of + place, mask=inside, other=0)
    else:
        row = place.to(tl.int64)
    element = exponent_votes + row * groups + group
    held = tl.load(element, mask=inside, other=0).to(tl.int64)
    if SCALED:
        bits = draw_at(row, group, groups, key, next_key, WIDE).to(tl.int64)
        noise = bits & ((tl.cast(1, tl.int64) << exponent_shift) - 1)
        held = held - ((total.to(tl.int64) + noise) >> exponent_shift)
        held = tl.minimum(tl.maximum(held, -127), 127)
    else:
        held = held - ((total > 0).to(tl.int64) - (total < 0).to(tl.int64))
        held = tl.minimum(tl.maximum(held, -128), 127)
    tl.store(element, held.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["voted_rows"])
def settle_correlation_kernel(
    score,
    correlation,
    steps,
    row_of,
    voted_rows,
    groups,
    units,
    UNITS_PER_GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add scores to the correlation and count the update; both saturate."""
    index_C = indices(0, CHUNK)
    inside = index_C < voted_rows * groups
    place = index_C // groups
    group = index_C % groups
    total = _score(score, place, group * UNITS_PER_GROUP, inside, units, UNITS_PER_GROUP)
    row = tl.load(row_of + place, mask=inside, other=0)
    element = row * groups + group
    correlated = tl.load(correlation + element, mask=inside, other=0)
    moved = correlated.to(tl.int32) + total
    moved = tl.minimum(tl.maximum(moved, -32768), 32767)
    tl.store(correlation + element, moved.to(tl.int16), mask=inside)
    counted = tl.load(steps + element, mask=inside, other=0)
    counted = tl.where(counted == 2147483647, counted, counted + 1)
    tl.store(steps + element, counted, mask=inside)
