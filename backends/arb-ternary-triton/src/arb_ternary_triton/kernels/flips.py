"""Turn votes into flips: accumulators that cross the threshold move trits and exponents."""

from __future__ import annotations

import triton
import triton.language as tl

from arb_ternary_triton.kernels.common import (
    both,
    draw_at,
    indices,
    load_trits,
    load_votes,
    store_trits,
    store_votes,
    wide_indices,
)


@triton.jit
def _leaked(held, leak):
    """Return accumulators moved ``leak`` units towards zero, not past it."""
    size = tl.maximum(tl.abs(held) - leak, 0)
    return tl.where(held < 0, -size, size)


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
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Flip trits: ``f = [A >= theta] - [A <= -theta]``, ``T = clip(T + f, -1, 1)``.

    Then reset or carry the accumulators, and let them leak or decay.
    """
    row_R = indices(0, ROWS)
    first = tl.program_id(1) * COLUMNS
    column_C = first + tl.arange(0, COLUMNS)
    in_rows = row_R < rows
    inside = both(in_rows, column_C < columns)
    held = load_votes(votes, row_R, column_C, in_rows, columns, vote_width, BITS)
    held = tl.where(inside, held, 0)
    crossed = (held >= threshold).to(tl.int32) - (held <= -threshold).to(tl.int32)
    crossings_by_row = tl.sum(tl.abs(crossed), axis=1)
    crossings = tl.sum(crossings_by_row, axis=0)

    # Most tiles have no crossing: their weight is not even read.
    if crossings > 0:
        before = load_trits(packed, row_R, column_C, in_rows, row_bytes)
        after = tl.minimum(tl.maximum(before + crossed, -1), 1)
        moved = after - before
        store_trits(packed, after, row_R, first, in_rows, row_bytes)
        flips_by_row = tl.sum(tl.abs(moved), axis=1)
        count = tl.sum(flips_by_row, axis=0)
        tl.atomic_add(flips, count.to(tl.int64), mask=count > 0)
        if CARRY:
            stuck = crossed - moved
            is_stuck = stuck != 0
            half = stuck * (threshold // 2)
            held = tl.where(is_stuck, half, held - moved * threshold)
        else:
            held = tl.where(crossed != 0, 0, held)

    if LEAK:
        held = _leaked(held, leak)
    if DECAY:
        row = (first_row + row_R)[:, None]
        bits = draw_at(row, column_C[None, :], columns, key, next_key, WIDE)
        scaled = tl.abs(held) * decay
        noise = (bits & 0xFFFF).to(tl.int32)
        held = _leaked(held, (scaled + noise) >> 16)
    if LEAK or DECAY or crossings > 0:
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
