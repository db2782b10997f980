"""Pack and unpack messages between ranks: votes as digits in bytes, and lists of flipped trits.

Also convert sums of votes to quanta.
"""

from __future__ import annotations

import triton
import triton.language as tl

from arb_ternary_triton.kernels.common import (
    code_place,
    draw,
    flat_index,
    indices,
    load_trits,
    wide_indices,
)


@triton.jit
def pack_digits_kernel(
    values,
    packed,
    count,
    width,
    BASE: tl.constexpr,
    DIGITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Pack the values ``i``, ``i + width``, ... into byte ``i``, least significant digit first.

    Missing values are 0.
    """
    index_C = wide_indices(0, CHUNK)
    inside = index_C < width
    byte = tl.zeros([CHUNK], dtype=tl.int32)
    for above in tl.static_range(DIGITS):
        place = index_C + (DIGITS - 1 - above) * tl.cast(width, tl.int64)
        in_values = inside & (place < count)
        value = tl.load(values + place, mask=in_values, other=0).to(tl.int32)
        byte = byte * BASE + value + BASE // 2
    tl.store(packed + index_C, byte.to(tl.uint8), mask=inside)


@triton.jit
def add_digits_kernel(
    packed,
    total,
    count,
    width,
    BASE: tl.constexpr,
    DIGITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add the values of bytes that :func:`pack_digits_kernel` packed to ``total``."""
    index_C = wide_indices(0, CHUNK)
    inside = index_C < width
    rest = tl.load(packed + index_C, mask=inside, other=0).to(tl.int32)
    for below in tl.static_range(DIGITS):
        place = index_C + below * tl.cast(width, tl.int64)
        in_total = inside & (place < count)
        before = tl.load(total + place, mask=in_total, other=0)
        after = before.to(tl.int32) + rest % BASE - BASE // 2
        tl.store(total + place, after.to(before.dtype), mask=in_total)
        rest = rest // BASE


@triton.jit
def _moved(before, after, rows, row_bytes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the rows and columns of a tile, and the difference of its trits, int32 ``[R, C]``.

    Padding does not differ.
    """
    row_R = indices(0, ROWS)
    column_C = indices(1, COLUMNS)
    in_rows = row_R < rows
    old = load_trits(before, row_R, column_C, in_rows, row_bytes)
    new = load_trits(after, row_R, column_C, in_rows, row_bytes)
    return row_R, column_C, new - old


@triton.jit
def count_flips_kernel(
    before,
    after,
    counts,
    rows,
    row_bytes,
    tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Count the trits in which two packed weights differ, int64 ``[rows, tiles]``."""
    row_R, _, moved = _moved(before, after, rows, row_bytes, ROWS, COLUMNS)
    flipped = moved != 0
    count_R = tl.sum(flipped.to(tl.int32), axis=1)
    place = row_R.to(tl.int64) * tiles + tl.program_id(1)
    tl.store(counts + place, count_R.to(tl.int64), mask=row_R < rows)


@triton.jit
def list_flips_kernel(
    before,
    after,
    ends,
    places,
    directions,
    rows,
    columns,
    row_bytes,
    tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """List places and directions of the flips; ``ends`` are the running sums of the counts."""
    row_R, column_C, moved = _moved(before, after, rows, row_bytes, ROWS, COLUMNS)
    flipped = moved != 0
    count_R = tl.sum(flipped.to(tl.int32), axis=1)
    if tl.sum(count_R, axis=0) > 0:
        own = row_R.to(tl.int64) * tiles + tl.program_id(1)
        end_R = tl.load(ends + own, mask=row_R < rows, other=0)
        first_R = (end_R - count_R)[:, None]
        target = first_R + tl.cumsum(flipped.to(tl.int32), axis=1) - 1
        place = flat_index(row_R, columns, column_C)
        tl.store(places + target, place, mask=flipped)
        tl.store(directions + target, moved.to(tl.int8), mask=flipped)


@triton.jit
def _word_of(place, columns, row_bytes):
    """Return the 32-bit word that holds the code of a place, and the code's shift in it."""
    row = place // columns
    column = (place % columns).to(tl.int32)
    byte, shift = code_place(column)
    word = row * (row_bytes // 4) + byte // 4
    return word, byte % 4 * 8 + shift


@triton.jit
def check_flips_kernel(
    words,
    places,
    directions,
    faults,
    count,
    rows,
    columns,
    row_bytes,
    CHUNK: tl.constexpr,
):
    """Count flips outside the weight, and flips that lead outside -1..1: int32 ``[2]``."""
    index_C = wide_indices(0, CHUNK)
    inside = index_C < count
    place = tl.load(places + index_C, mask=inside, other=0)
    direction = tl.load(directions + index_C, mask=inside, other=0).to(tl.int32)
    in_weight = (place >= 0) & (place < tl.cast(rows, tl.int64) * columns)
    word, shift = _word_of(tl.where(in_weight, place, 0), columns, row_bytes)
    held = tl.load(words + word, mask=inside & in_weight, other=0)
    wanted = ((held >> shift) & 3) + direction
    beyond = inside & in_weight & ((wanted < 0) | (wanted > 2))
    outside = inside & ~in_weight
    tl.atomic_add(faults, tl.sum(outside.to(tl.int32), axis=0))
    tl.atomic_add(faults + 1, tl.sum(beyond.to(tl.int32), axis=0))


@triton.jit
def apply_flips_kernel(
    words,
    places,
    directions,
    count,
    columns,
    row_bytes,
    CHUNK: tl.constexpr,
):
    """Add each direction to its code.

    No code leaves its two bits, so additions to one word commute.
    """
    index_C = wide_indices(0, CHUNK)
    inside = index_C < count
    place = tl.load(places + index_C, mask=inside, other=0)
    direction = tl.load(directions + index_C, mask=inside, other=0).to(tl.int32)
    word, shift = _word_of(place, columns, row_bytes)
    tl.atomic_add(words + word, direction << shift, mask=inside)


@triton.jit(do_not_specialize=["whole", "fraction", "start", "key", "next_key"])
def quanta_kernel(
    sums,
    quanta,
    count,
    whole,
    fraction,
    start,
    key,
    next_key,
    CHUNK: tl.constexpr,
):
    """Return ``floor(sums * (whole + fraction / 2**24) + u)``, clipped to int32.

    ``next_key`` is the key of the next 2**32 indices.
    """
    index_C = wide_indices(0, CHUNK)
    inside = index_C < count
    place = start.to(tl.uint32, bitcast=True).to(tl.int64) + index_C
    is_low = place >> 32 == 0
    low = draw(place.to(tl.uint32), key)
    high = draw(place.to(tl.uint32), next_key)
    bits = tl.where(is_low, low, high)
    sums_C = tl.load(sums + index_C, mask=inside, other=0).to(tl.int64)
    scaled = sums_C * fraction
    noise = (bits >> 8).to(tl.int64)
    worth = ((scaled + noise) >> 24) + sums_C * whole
    worth = tl.minimum(tl.maximum(worth, -(2**31)), 2**31 - 1)
    tl.store(quanta + index_C, worth.to(tl.int32), mask=inside)
