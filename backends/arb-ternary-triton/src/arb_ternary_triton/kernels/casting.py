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
    indices,
    load_votes,
    store_votes,
)
from arb_ternary_triton.kernels.words import (
    absolute,
    ceiling,
    laid_out_like,
    load_trit_bytes,
    saturated_word,
    signed_byte,
    signed_dot,
    upper_bits,
    word_pointers,
)


@triton.jit
def _quarters(tile_RC):
    """Return every fourth column, from the first, second, third and fourth on: ``[R, C / 4]``."""
    rows: tl.constexpr = tile_RC.shape[0]
    words: tl.constexpr = tile_RC.shape[1] // 4
    even, odd = tl.split(tl.reshape(tile_RC, (rows, words, 2, 2)))
    part_0, part_2 = tl.split(even)
    part_1, part_3 = tl.split(odd)
    return part_0, part_1, part_2, part_3


@triton.jit
def _whole(part_0, part_1, part_2, part_3):
    """Return ``[R, C]`` from the parts of :func:`_quarters`."""
    rows: tl.constexpr = part_0.shape[0]
    columns: tl.constexpr = part_0.shape[1] * 4
    joined = tl.join(tl.join(part_0, part_2), tl.join(part_1, part_3))
    return tl.reshape(joined, (rows, columns))


@triton.jit
def _sums(part_0, part_1, part_2, part_3):
    """Return the sums over rows ``[R]`` and over columns ``[C]``."""
    by_row = tl.sum((part_0 + part_1) + (part_2 + part_3), axis=1)
    sum_0 = tl.sum(part_0, axis=0)
    sum_1 = tl.sum(part_1, axis=0)
    sum_2 = tl.sum(part_2, axis=0)
    sum_3 = tl.sum(part_3, axis=0)
    joined = tl.join(tl.join(sum_0, sum_2), tl.join(sum_1, sum_3))
    return by_row, tl.reshape(joined, (4 * part_0.shape[1],))


@triton.jit
def _square_sums(part_0, part_1, part_2, part_3):
    """Return :func:`_sums` of the squares in float32."""
    wide_0 = part_0.to(tl.float32)
    wide_1 = part_1.to(tl.float32)
    wide_2 = part_2.to(tl.float32)
    wide_3 = part_3.to(tl.float32)
    return _sums(wide_0 * wide_0, wide_1 * wide_1, wide_2 * wide_2, wide_3 * wide_3)


@triton.jit
def _store_sums(
    part, by_row, by_column, place_R, in_rows, column_C, in_columns, voted_rows, columns
):
    """Store the partial sums of a tile."""
    row_part = part + tl.program_id(1).to(tl.int64) * voted_rows
    column_parts = part + tl.num_programs(1).to(tl.int64) * voted_rows
    column_part = column_parts + tl.program_id(0).to(tl.int64) * columns
    tl.store(row_part + place_R, by_row, mask=in_rows)
    tl.store(column_part + column_C, by_column, mask=in_columns)


@triton.jit
def _size(gradient, SHORT: tl.constexpr, ISA: tl.constexpr):
    """Return absolute values in the type in which they are summed."""
    if gradient.dtype.is_floating():
        return tl.abs(gradient)
    elif SHORT:
        return absolute(gradient, ISA).to(tl.uint32)
    else:
        return tl.abs(gradient).to(tl.int64)


@triton.jit
def _sign(gradient):
    if gradient.dtype.is_floating():
        # The bits of a float have its sign; adding 0 makes -0 a 0.
        gradient = (gradient + 0.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(gradient, -1), 1).to(tl.int32)


@triton.jit
def _float_vote(
    gradient, scale, row_R, column_W, largest, bits, noise_shift, HAS_SCALE: tl.constexpr, ISA
):
    """Return ``floor(clip((g * row) * column, -largest, largest) + u)``, negated, in int32.

    ``u`` lies around one half, in an interval of width ``2**-noise_shift``. A product that is NaN
    counts as 0.
    """
    product = gradient.to(tl.float32)
    if HAS_SCALE:
        product = product * scale
    product = product * -row_R[:, None]
    product = product * column_W
    product = tl.maximum(product, -largest, propagate_nan=tl.PropagateNan.ALL)
    product = tl.minimum(product, largest, propagate_nan=tl.PropagateNan.ALL)

    width = 1 << (24 - noise_shift)
    noise = upper_bits(bits, width, ((1 << 24) - width) >> 1, ISA)
    # The product with a power of two is exact: only the sum is rounded.
    unit = tl.full(bits.shape, -(2.0**-24), tl.float32)
    return ceiling(tl.fma(noise.to(tl.float32), unit, product), ISA)


@triton.jit
def _integer_vote(gradient, row_R, column_W, limit, bits, SHORT: tl.constexpr):
    """Return the vote as a stochastic shift to the right, negated."""
    shift = row_R[:, None] + column_W
    shift = tl.minimum(tl.maximum(shift, -16), 31).to(tl.int32)
    right = tl.maximum(shift, 0)
    left = tl.maximum(-shift, 0)
    mask = (tl.cast(1, tl.uint32) << right.to(tl.uint32)) - 1
    noise = bits & mask
    if SHORT:
        # No gradient reaches 2**25, and one of 128 to the left of its vote is beyond the limit.
        over = tl.maximum(right - 8, 0)
        bound = (tl.minimum(limit, (1 << 30) >> over) << over) >> tl.maximum(8 - right, 0)
        near = tl.minimum(tl.maximum(gradient, -128), 128)
        value = tl.where(left > 0, near << left, gradient)
        value = tl.minimum(tl.maximum(value, -bound), bound)
        rest = (value.to(tl.uint32, bitcast=True) & mask) + noise
        carry = (rest >> right.to(tl.uint32)).to(tl.int32)
        return -((value >> right) + carry)
    else:
        bound = (limit.to(tl.int64) << right) >> 8
        shifted = gradient.to(tl.int64) << left
        value = tl.minimum(tl.maximum(shifted, -bound), bound)
        return -((value + noise) >> right).to(tl.int32)


@triton.jit
def _short_integer_vote(gradient, row_R, column_W, limit, bits):
    """Return what :func:`_integer_vote` does, for shifts of 0 to 30 and whole limits."""
    shift = row_R.to(tl.int32)[:, None] + column_W.to(tl.int32)
    # The floor of a number, negated, is the ceiling of the number negated.
    rest = ~bits.to(tl.int32, bitcast=True) & ((1 << shift) - 1)
    largest = limit >> 8
    return tl.minimum(tl.maximum((rest - gradient) >> shift, -largest), largest)


@triton.jit
def _store_scores(
    score,
    product_RW,
    row_R,
    in_rows,
    first,
    columns,
    units,
    UNIT: tl.constexpr,
):
    """Sum over ``UNIT`` columns each and store the sums in int32 ``score[R, units]``."""
    rows: tl.constexpr = product_RW.shape[0]
    count: tl.constexpr = product_RW.shape[1] * 4 // UNIT
    by_unit = tl.reshape(product_RW, (rows, count, UNIT // 4))
    sums = -tl.sum(by_unit, axis=2)
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
    WORDS: tl.constexpr,
    SHORT: tl.constexpr,
    ISA: tl.constexpr,
):
    """Cast the votes of a gradient tile.

    The columns of the tile are taken in four parts, so that the accumulators and trits of four
    neighbouring columns are a word. Votes are formed with the sign with which they are added.

    Args:
        gradient: float32, int32 or int64 ``[R, C]``; 0 or NaN outside the weight.
        place_R: position of each row among the rows that are voted on, for partial sums.
        row_R: row of the weight.
        voted_rows: number of rows that are voted on.
        bad: int32 counter of NaN gradients.
        squares: float32 partial sums of squares: ``[column tiles, voted_rows]``, then ``[row tiles,
            K]``.
        sizes: partial sums of absolute values in the same layout, int64 for integer gradients.
        MODE: 0 for sign votes, 1 for votes by factors, 2 for votes by shifts.
        UNIT: columns of a partial score; 0 if exponents do not learn.
        WORDS: whether int8 accumulators can be read and written four at a time.
        SHORT: whether the sums of a tile's integers fit in 32 bits.
        ISA: the instruction set.
    """
    column_C = first + tl.arange(0, gradient.shape[1])
    in_columns = column_C < columns
    word_W = first // 4 + tl.arange(0, gradient.shape[1] // 4)
    word_place = word_pointers(votes, row_R, vote_width, word_W)
    in_words = both(in_rows, word_W < vote_width // 4)
    g_0, g_1, g_2, g_3 = _quarters(gradient)
    if WORDS:
        word = tl.load(word_place, mask=in_words, other=0)
        g_0 = laid_out_like(g_0, word, ISA)
        g_1 = laid_out_like(g_1, word, ISA)
        g_2 = laid_out_like(g_2, word, ISA)
        g_3 = laid_out_like(g_3, word, ISA)
    # Partial sums of this tile.
    by_row, by_column = _square_sums(g_0, g_1, g_2, g_3)
    if gradient.dtype.is_floating():  # noqa: SIM102
        # A sum of squares is NaN only if one of them is.
        if tl.max((by_row != by_row).to(tl.int32)) > 0:
            nan = both(in_rows, in_columns) & (gradient != gradient)
            tl.atomic_add(bad, tl.sum(nan.to(tl.int32)))
            g_0 = tl.where(g_0 != g_0, 0.0, g_0)
            g_1 = tl.where(g_1 != g_1, 0.0, g_1)
            g_2 = tl.where(g_2 != g_2, 0.0, g_2)
            g_3 = tl.where(g_3 != g_3, 0.0, g_3)
            by_row, by_column = _square_sums(g_0, g_1, g_2, g_3)
    _store_sums(
        squares, by_row, by_column, place_R, in_rows, column_C, in_columns, voted_rows, columns
    )
    if MODE > 0:
        by_row, by_column = _sums(
            _size(g_0, SHORT, ISA),
            _size(g_1, SHORT, ISA),
            _size(g_2, SHORT, ISA),
            _size(g_3, SHORT, ISA),
        )
        _store_sums(
            sizes, by_row, by_column, place_R, in_rows, column_C, in_columns, voted_rows, columns
        )

    if MODE == 0:
        v_0 = -_sign(g_0)
        v_1 = -_sign(g_1)
        v_2 = -_sign(g_2)
        v_3 = -_sign(g_3)
    else:
        row = row_R[:, None]
        column = (word_W * 4)[None, :]
        bits_0 = draw_at(row, column, columns, key, next_key, WIDE)
        bits_1 = draw_at(row, column + 1, columns, key, next_key, WIDE)
        bits_2 = draw_at(row, column + 2, columns, key, next_key, WIDE)
        bits_3 = draw_at(row, column + 3, columns, key, next_key, WIDE)
        of_row = tl.load(vote_scale + row_R, mask=in_rows, other=0)
        of_column = tl.load(vote_scale + rows + column_C, mask=in_columns, other=0)
        column_0, column_1, column_2, column_3 = _quarters(of_column[None, :])
        if MODE == 1:
            unit = tl.load(scale)
            most = limit.to(tl.float32) * (1.0 / 256)
            z = noise_shift
            v_0 = _float_vote(g_0, unit, of_row, column_0, most, bits_0, z, HAS_SCALE, ISA)
            v_1 = _float_vote(g_1, unit, of_row, column_1, most, bits_1, z, HAS_SCALE, ISA)
            v_2 = _float_vote(g_2, unit, of_row, column_2, most, bits_2, z, HAS_SCALE, ISA)
            v_3 = _float_vote(g_3, unit, of_row, column_3, most, bits_3, z, HAS_SCALE, ISA)
        else:
            # The scale is a normal power of two.
            exponent = (tl.load(scale).to(tl.int32, bitcast=True) >> 23) - 127
            of_row = of_row.to(tl.int64) - exponent
            column_0 = column_0.to(tl.int64)
            column_1 = column_1.to(tl.int64)
            column_2 = column_2.to(tl.int64)
            column_3 = column_3.to(tl.int64)
            fits = False
            if SHORT:
                low = tl.minimum(tl.minimum(column_0, column_1), tl.minimum(column_2, column_3))
                high = tl.maximum(tl.maximum(column_0, column_1), tl.maximum(column_2, column_3))
                least = tl.min(of_row) + tl.min(low)
                most = tl.max(of_row) + tl.max(high)
                fits = (least >= 0) & (most <= 30) & (limit % 256 == 0)
            if fits:
                v_0 = _short_integer_vote(g_0, of_row, column_0, limit, bits_0)
                v_1 = _short_integer_vote(g_1, of_row, column_1, limit, bits_1)
                v_2 = _short_integer_vote(g_2, of_row, column_2, limit, bits_2)
                v_3 = _short_integer_vote(g_3, of_row, column_3, limit, bits_3)
            else:
                v_0 = _integer_vote(g_0, of_row, column_0, limit, bits_0, SHORT)
                v_1 = _integer_vote(g_1, of_row, column_1, limit, bits_1, SHORT)
                v_2 = _integer_vote(g_2, of_row, column_2, limit, bits_2, SHORT)
                v_3 = _integer_vote(g_3, of_row, column_3, limit, bits_3, SHORT)

    if UNIT > 0:
        trit = load_trit_bytes(packed, row_R, word_W, in_rows, row_bytes, ISA)
        product = signed_dot(trit, saturated_word(v_0, v_1, v_2, v_3, ISA), ISA)
        _store_scores(score, product, place_R, in_rows, first, columns, units, UNIT)

    if WORDS:
        v_0 += signed_byte(word, 0, ISA)
        v_1 += signed_byte(word, 1, ISA)
        v_2 += signed_byte(word, 2, ISA)
        v_3 += signed_byte(word, 3, ISA)
    else:
        held = load_votes(votes, row_R, column_C, in_rows, columns, vote_width, BITS)
        h_0, h_1, h_2, h_3 = _quarters(held)
        v_0 += h_0
        v_1 += h_1
        v_2 += h_2
        v_3 += h_3
    if WORDS:
        if SMALLEST > -128:
            v_0 = tl.maximum(v_0, SMALLEST)
            v_1 = tl.maximum(v_1, SMALLEST)
            v_2 = tl.maximum(v_2, SMALLEST)
            v_3 = tl.maximum(v_3, SMALLEST)
        tl.store(word_place, saturated_word(v_0, v_1, v_2, v_3, ISA), mask=in_words)
    else:
        held = _whole(v_0, v_1, v_2, v_3)
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
    WORDS: tl.constexpr,
    SHORT: tl.constexpr,
    ISA: tl.constexpr,
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
        WORDS,
        SHORT,
        ISA,
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
    WORDS: tl.constexpr,
    SHORT: tl.constexpr,
    ISA: tl.constexpr,
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
        WORDS,
        SHORT,
        ISA,
    )


@triton.jit
def _settle_sums(
    of_rows,
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
    """Add partial sums, in their order, to ``target [N + K]``: those of rows or of columns."""
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


@triton.jit
def _settle_exponents(
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


@triton.jit(do_not_specialize=["voted_rows", "exponent_shift", "key", "next_key"])
def settle_kernel(
    squares,
    stats,
    sizes,
    magnitudes,
    score,
    exponent_votes,
    bad,
    scale,
    row_of,
    voted_rows,
    rows,
    columns,
    row_parts,
    column_parts,
    groups,
    units,
    exponent_shift,
    key,
    next_key,
    INDEXED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SCALED: tl.constexpr,
    EXPONENTS: tl.constexpr,
    WIDE: tl.constexpr,
    UNITS_PER_GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add what the tiles of a cast have left to statistics, magnitudes and exponent votes.

    The second axis of the grid: squares by row and by column, the same of magnitudes with
    ``SCALED``, and with ``EXPONENTS`` the votes for exponents, which the last index is for.
    """
    part = tl.program_id(1)
    if part < 2:
        if part + tl.program_id(0) == 0:
            tl.store(stats, tl.load(stats) + tl.load(bad).to(tl.float32))
        _settle_sums(
            part == 0,
            squares,
            stats + 1,
            scale,
            row_of,
            voted_rows,
            rows,
            columns,
            row_parts,
            column_parts,
            INDEXED,
            HAS_SCALE,
            True,
            CHUNK,
        )
    if SCALED:  # noqa: SIM102, decided by the compiler
        if (part == 2) | (part == 3):
            _settle_sums(
                part == 2,
                sizes,
                magnitudes,
                scale,
                row_of,
                voted_rows,
                rows,
                columns,
                row_parts,
                column_parts,
                INDEXED,
                HAS_SCALE,
                False,
                CHUNK,
            )
    if EXPONENTS:  # noqa: SIM102, decided by the compiler
        if part == tl.num_programs(1) - 1:
            _settle_exponents(
                score,
                exponent_votes,
                row_of,
                voted_rows,
                groups,
                units,
                exponent_shift,
                key,
                next_key,
                INDEXED,
                SCALED,
                WIDE,
                UNITS_PER_GROUP,
                CHUNK,
            )


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
