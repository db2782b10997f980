"""Turn votes into flips: accumulators that cross the threshold move trits and exponents."""

from __future__ import annotations

import triton
import triton.language as tl

from arb_ternary_triton.kernels.common import (
    both,
    draw_at,
    indices,
    load_votes,
    store_votes,
    wide_indices,
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
    row_R = indices(0, ROWS)
    first = tl.program_id(1) * COLUMNS
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
    index_C = wide_indices(0, CHUNK)
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
