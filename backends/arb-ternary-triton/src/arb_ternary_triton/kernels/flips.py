"""Turn votes into flips: accumulators that cross the threshold move trits and exponents."""

from __future__ import annotations

import triton
import triton.language as tl

from arb_ternary_triton.kernels.common import (
    both,
    draw_at,
    load_votes,
    store_votes,
)
from arb_ternary_triton.kernels.words import (
    ONES,
    at_least,
    filled,
    from_words,
    in_words,
    load_codes,
    nearer_to_zero,
    plus_byte_times,
    sizes_and_signs,
    store_codes,
    third_bytes,
    with_signs,
    word_pointers,
)


@triton.jit
def _leaked(held, leak):
    """Return accumulators moved ``leak`` units towards zero, not past it."""
    size = tl.maximum(tl.abs(held) - leak, 0)
    return tl.where(held < 0, -size, size)


@triton.jit
def _flip_words(
    packed,
    flips,
    size,
    sign,
    reached,
    row_R,
    first_word,
    in_rows,
    row_bytes,
    threshold,
    CARRY: tl.constexpr,
):
    """Flip the trits of accumulators that reached the threshold; return the sizes afterwards."""
    word_W = first_word + tl.arange(0, size.shape[1])
    code = load_codes(packed, row_R, word_W, in_rows, row_bytes)
    crossed = reached >> 7
    rising = crossed & ~sign & ~(code >> 1)
    falling = crossed & sign & (code | (code >> 1))
    moved = rising | falling
    store_codes(packed, code + rising - falling, row_R, first_word, in_rows, row_bytes)
    count = tl.sum((moved * ONES) >> 24)
    tl.atomic_add(flips, count.to(tl.int64), mask=count > 0)
    if CARRY:
        theta = threshold.to(tl.uint32) * ONES
        stuck = filled(crossed - moved)
        half = (threshold // 2).to(tl.uint32) * ONES
        return ((size - (theta & filled(moved))) & ~stuck) | (half & stuck)
    else:
        return size & ~filled(crossed)


@triton.jit
def _decayed(size, row_R, word_W, columns, decay, key, next_key, WIDE: tl.constexpr, ISA):
    """Return what each of four sizes loses: ``(size * decay + (h & 0xFFFF)) >> 16``."""
    row = row_R[:, None]
    column = (word_W * 4)[None, :]
    noise_0 = draw_at(row, column, columns, key, next_key, WIDE) & 0xFFFF
    noise_1 = draw_at(row, column + 1, columns, key, next_key, WIDE) & 0xFFFF
    noise_2 = draw_at(row, column + 2, columns, key, next_key, WIDE) & 0xFFFF
    noise_3 = draw_at(row, column + 3, columns, key, next_key, WIDE) & 0xFFFF
    factor = decay.to(tl.uint32)
    return third_bytes(
        plus_byte_times(noise_0, size, factor, 0, ISA),
        plus_byte_times(noise_1, size, factor, 1, ISA),
        plus_byte_times(noise_2, size, factor, 2, ISA),
        plus_byte_times(noise_3, size, factor, 3, ISA),
        ISA,
    )


@triton.jit
def _flip_tile(
    row_tile,
    column_tile,
    packed,
    votes,
    flips,
    rows,
    columns,
    row_bytes,
    vote_width,
    threshold,
    leak,
    decay,
    key,
    next_key,
    first_row,
    CARRY: tl.constexpr,
    LEAK: tl.constexpr,
    DECAY: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    WIDE: tl.constexpr,
    ISA: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Flip the trits of one tile and count them; see :func:`flip_kernel`."""
    row_R = row_tile * ROWS + tl.arange(0, ROWS)
    first = column_tile * COLUMNS
    in_rows = row_R < rows
    first_word = first // 4
    word_W = first_word + tl.arange(0, COLUMNS // 4)
    place = word_pointers(votes, row_R, vote_width, word_W)
    inside = both(in_rows, word_W < vote_width // 4)
    if WORDS:
        word = tl.load(place, mask=inside, other=0)
    else:
        column_C = first + tl.arange(0, COLUMNS)
        held = load_votes(votes, row_R, column_C, in_rows, columns, vote_width, BITS)
        word = in_words(tl.where(both(in_rows, column_C < columns), held, 0))
    size, sign = sizes_and_signs(word, ISA)
    reached = at_least(size, threshold)
    crossings = tl.max(reached)

    # Most tiles have no crossing: their weight is not even read.
    if crossings > 0:
        size = _flip_words(
            packed,
            flips,
            size,
            sign,
            reached,
            row_R,
            first_word,
            in_rows,
            row_bytes,
            threshold,
            CARRY,
        )
        word = with_signs(size, sign)

    if LEAK:
        bounded = tl.minimum(leak, 128)
        more = filled(at_least(size, bounded) >> 7)
        lost = (bounded.to(tl.uint32) * ONES & more) | (size & ~more)
        word = nearer_to_zero(word, lost, sign)
    if DECAY:
        lost = _decayed(size, first_row + row_R, word_W, columns, decay, key, next_key, WIDE, ISA)
        word = nearer_to_zero(word, lost, sign)
    if LEAK or DECAY or crossings > 0:
        if WORDS:
            tl.store(place, word, mask=inside)
        else:
            held = from_words(word)
            store_votes(votes, held, row_R, first, in_rows, columns, vote_width, BITS)


@triton.jit(do_not_specialize=["threshold", "leak", "decay", "key", "next_key", "first_row"])
def flip_kernel(
    packed,
    votes,
    flips,
    rows,
    columns,
    row_bytes,
    vote_width,
    threshold,
    leak,
    decay,
    key,
    next_key,
    first_row,
    CARRY: tl.constexpr,
    LEAK: tl.constexpr,
    DECAY: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    WIDE: tl.constexpr,
    ISA: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Flip trits: ``f = [A >= theta] - [A <= -theta]``, ``T = clip(T + f, -1, 1)``.

    Then reset or carry the accumulators, and let them leak or decay. ``WORDS`` says that int8
    accumulators can be read and written four at a time.
    """
    _flip_tile(
        tl.program_id(0),
        tl.program_id(1),
        packed,
        votes,
        flips,
        rows,
        columns,
        row_bytes,
        vote_width,
        threshold,
        leak,
        decay,
        key,
        next_key,
        first_row,
        CARRY,
        LEAK,
        DECAY,
        BITS,
        WORDS,
        WIDE,
        ISA,
        ROWS,
        COLUMNS,
    )


#: Numbers per weight in the table of :func:`flip_together_kernel`, and of
#: :func:`move_together_kernel`.
FIELDS = tl.constexpr(14)


@triton.jit
def _pointer(field, ALIGNED: tl.constexpr, TYPE: tl.constexpr):
    """Return the pointer whose address is an element of a table."""
    pointer = tl.load(field).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _number(field, ALIGNED: tl.constexpr):
    """Return an element of a table as int32."""
    number = tl.load(field).to(tl.int32)
    if ALIGNED:
        number = tl.multiple_of(number, 16)
    return number


@triton.jit
def flip_together_kernel(
    table,
    weight_of,
    flips,
    CARRY: tl.constexpr,
    LEAK: tl.constexpr,
    DECAY: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    WIDE: tl.constexpr,
    ISA: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Flip the trits of several weights as :func:`flip_kernel` does.

    A program reads the arguments of its weight from ``table``, int64 ``[weights, FIELDS]``: the
    weight's first program and its tiles in a row, then those of ``flip_kernel`` without ``flips``.
    ``ALIGNED`` says that addresses and widths are multiples of 16.
    """
    program = tl.program_id(0)
    weight = tl.load(weight_of + program)
    field = table + weight * FIELDS
    tile = program - tl.load(field).to(tl.int32)
    tiles_in_row = tl.load(field + 1).to(tl.int32)
    _flip_tile(
        tile // tiles_in_row,
        tile % tiles_in_row,
        _pointer(field + 2, ALIGNED, tl.uint8),
        _pointer(field + 3, ALIGNED, tl.int8 if BITS == 8 else tl.uint8),
        flips + weight,
        _number(field + 4, False),
        _number(field + 5, ALIGNED),
        _number(field + 6, ALIGNED),
        _number(field + 7, ALIGNED),
        _number(field + 8, False),
        _number(field + 9, False),
        _number(field + 10, False),
        _number(field + 11, False),
        _number(field + 12, False),
        _number(field + 13, False),
        CARRY,
        LEAK,
        DECAY,
        BITS,
        WORDS,
        WIDE,
        ISA,
        ROWS,
        COLUMNS,
    )


@triton.jit
def _move_chunk(
    chunk,
    exponent,
    exponent_votes,
    origin,
    moves,
    count,
    groups,
    origin_row,
    origin_column,
    threshold,
    band,
    leak,
    CHUNK: tl.constexpr,
):
    """Move ``CHUNK`` exponents and count them; see :func:`flip_exponents_kernel`."""
    index_C = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = index_C < count
    before = tl.load(exponent + index_C, mask=inside, other=0).to(tl.int32)
    held = tl.load(exponent_votes + index_C, mask=inside, other=0).to(tl.int32)
    place = index_C // groups * origin_row + index_C % groups * origin_column
    centre = tl.load(origin + place, mask=inside, other=0).to(tl.int32)

    up = (held >= threshold).to(tl.int32) - (held <= -threshold).to(tl.int32)
    after = tl.minimum(tl.maximum(before + up, centre - band), centre + band)
    after = tl.minimum(tl.maximum(after, -126), 127)
    tl.store(exponent + index_C, after.to(tl.int8), mask=inside)
    held = _leaked(held - threshold * up, leak)
    tl.store(exponent_votes + index_C, held.to(tl.int8), mask=inside)

    changed = inside & (after != before)
    moved = tl.sum(changed.to(tl.int32), axis=0)
    tl.atomic_add(moves, moved.to(tl.int64), mask=moved > 0)


@triton.jit(do_not_specialize=["threshold", "band", "leak"])
def flip_exponents_kernel(
    exponent,
    exponent_votes,
    origin,
    moves,
    count,
    groups,
    origin_row,
    origin_column,
    threshold,
    band,
    leak,
    CHUNK: tl.constexpr,
):
    """Move exponents: ``up = [B >= theta] - [B <= -theta]``, ``B -= theta * up``.

    ``E = clip(E + up, E0 - band, E0 + band)``.
    """
    _move_chunk(
        tl.program_id(0),
        exponent,
        exponent_votes,
        origin,
        moves,
        count,
        groups,
        origin_row,
        origin_column,
        threshold,
        band,
        leak,
        CHUNK,
    )


@triton.jit
def move_together_kernel(table, weight_of, moves, CHUNK: tl.constexpr):
    """Move the exponents of several weights as :func:`flip_exponents_kernel` does.

    ``table``, int64 ``[weights, FIELDS]``, holds the weight's first program, then the arguments of
    ``flip_exponents_kernel`` without ``moves``.
    """
    program = tl.program_id(0)
    weight = tl.load(weight_of + program)
    field = table + weight * FIELDS
    _move_chunk(
        program - tl.load(field).to(tl.int32),
        _pointer(field + 1, False, tl.int8),
        _pointer(field + 2, False, tl.int8),
        _pointer(field + 3, False, tl.int8),
        moves + weight,
        tl.load(field + 4),
        _number(field + 5, False),
        _number(field + 6, False),
        _number(field + 7, False),
        _number(field + 8, False),
        _number(field + 9, False),
        _number(field + 10, False),
        CHUNK,
    )
