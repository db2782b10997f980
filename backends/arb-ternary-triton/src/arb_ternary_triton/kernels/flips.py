"""Flips: accumulators that cross the threshold move trits and exponents."""

from __future__ import annotations

import triton
import triton.language as tl

from arb_ternary_triton.kernels.common import (
    draw_at,
    load_trits,
    load_votes,
    store_trits,
    store_votes,
)


@triton.jit
def _leaked(a, leak):
    """``leak`` units towards zero, not past it."""
    size = tl.maximum(tl.abs(a) - leak, 0)
    return tl.where(a < 0, -size, size)


@triton.jit(do_not_specialize=["threshold", "leak", "decay", "key", "next_key", "first_row"])
def flip_kernel(
    packed, votes, flips, rows, columns, row_bytes, vote_width, threshold, leak, decay, key,
    next_key,
    first_row,
    CARRY: tl.constexpr, LEAK: tl.constexpr, DECAY: tl.constexpr, BITS: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``f = [A >= theta] - [A <= -theta]``, ``T = clip(T + f, -1, 1)``; then accumulators, leak or
    decay.
    """
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * COLUMNS
    column_C = first + tl.arange(0, COLUMNS)
    in_rows = row_R < rows
    inside = in_rows[:, None] & (column_C < columns)[None, :]
    a = tl.where(inside, load_votes(votes, row_R, column_C, in_rows, columns, vote_width, BITS), 0)
    crossed = (a >= threshold).to(tl.int32) - (a <= -threshold).to(tl.int32)
    crossings = tl.sum(tl.sum(tl.abs(crossed), axis=1), axis=0)
    # Most tiles have no crossing: their weight is not even read.
    if crossings > 0:
        before = load_trits(packed, row_R, column_C, in_rows, row_bytes)
        after = tl.minimum(tl.maximum(before + crossed, -1), 1)
        moved = after - before
        store_trits(packed, after, row_R, first, in_rows, row_bytes)
        count = tl.sum(tl.sum(tl.abs(moved), axis=1), axis=0)
        tl.atomic_add(flips, count.to(tl.int64), mask=count > 0)
        if CARRY:
            stuck = crossed - moved
            a = tl.where(stuck != 0, stuck * (threshold // 2), a - moved * threshold)
        else:
            a = tl.where(crossed != 0, 0, a)
    if LEAK:
        a = _leaked(a, leak)
    if DECAY:
        bits = draw_at(
            (first_row + row_R)[:, None], column_C[None, :], columns, key, next_key, WIDE
        )
        a = _leaked(a, (tl.abs(a) * decay + (bits & 0xFFFF).to(tl.int32)) >> 16)
    if LEAK or DECAY or crossings > 0:
        store_votes(votes, a, row_R, first, in_rows, columns, vote_width, BITS)


@triton.jit(do_not_specialize=["threshold", "band", "leak"])
def flip_exponents_kernel(
    exponent, exponent_votes, origin, moves, count, groups, origin_row, origin_column, threshold,
    band, leak,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """``up = [B >= theta] - [B <= -theta]``, ``E = clip(E + up, E0 - band, E0 + band)``, ``B -=
    theta * up``.
    """
    index_C = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = index_C < count
    e = tl.load(exponent + index_C, mask=inside, other=0).to(tl.int32)
    b = tl.load(exponent_votes + index_C, mask=inside, other=0).to(tl.int32)
    place = index_C // groups * origin_row + index_C % groups * origin_column
    centre = tl.load(origin + place, mask=inside, other=0).to(tl.int32)
    up = (b >= threshold).to(tl.int32) - (b <= -threshold).to(tl.int32)
    wanted = tl.minimum(tl.maximum(e + up, centre - band), centre + band)
    wanted = tl.minimum(tl.maximum(wanted, -126), 127)
    tl.store(exponent + index_C, wanted.to(tl.int8), mask=inside)
    tl.store(exponent_votes + index_C, _leaked(b - threshold * up, leak).to(tl.int8), mask=inside)
    moved = tl.sum((inside & (wanted != e)).to(tl.int32), axis=0)
    tl.atomic_add(moves, moved.to(tl.int64), mask=moved > 0)
