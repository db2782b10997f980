"""Code that the kernels share: layouts, powers of two, the counter hash."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)
LANES = tl.constexpr(32)
#: A byte of four zero trits.
EMPTY = tl.constexpr(0x55)
#: What the counter hash multiplies an index by.
_STEP = tl.constexpr(0x9E3779B1)


@triton.jit
def indices(axis: tl.constexpr, SIZE: tl.constexpr):
    """Return the indices that a program has along an axis of the grid."""
    return tl.program_id(axis) * SIZE + tl.arange(0, SIZE)


@triton.jit
def wide_indices(axis: tl.constexpr, SIZE: tl.constexpr):
    """Return :func:`indices` in 64 bits."""
    return tl.program_id(axis).to(tl.int64) * SIZE + tl.arange(0, SIZE)


@triton.jit
def both(in_rows, in_columns):
    """Return the mask ``[R, C]`` of elements whose row and column are both in range."""
    return in_rows[:, None] & in_columns[None, :]


@triton.jit
def flat_index(row_R, width, column_C):
    """Return 64-bit indices ``[R, C]`` into a matrix with rows of ``width`` elements."""
    return row_R.to(tl.int64)[:, None] * width + column_C[None, :]


@triton.jit
def power_of_two(exponent):
    """Return the exact float32 ``2**exponent`` of int32 exponents in -126..127."""
    bits = (exponent + 127) << 23
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def floor_of(x):
    """Return ``floor(x)`` in int32 of float32 below 2**31.

    ``tl.floor`` would take subnormal numbers for 0, even negative ones.
    """
    whole = x.to(tl.int32)
    above = x < whole.to(tl.float32)
    return whole - above.to(tl.int32)


@triton.jit
def draw(index, key):
    """Return the uint32 counter hash of 32-bit indices; ``key`` is int32."""
    return _mixed(index.to(tl.uint32) * _STEP + key.to(tl.uint32, bitcast=True))


@triton.jit
def _mixed(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def draw_at(row, column, width, key, next_key, WIDE: tl.constexpr):
    """Return the hash of ``row * width + column``; ``next_key`` is for indices from 2**32 on."""
    if WIDE:
        index = row.to(tl.int64) * width + column
        low = draw(index.to(tl.uint32), key)
        is_low = index >> 32 == 0
        high = draw(index.to(tl.uint32), next_key)
        return tl.where(is_low, low, high)
    else:
        # Rows and columns are multiplied apart, which leaves one addition for an element.
        start = row.to(tl.uint32) * tl.cast(width, tl.uint32) * _STEP
        return _mixed(start + key.to(tl.uint32, bitcast=True) + column.to(tl.uint32) * _STEP)


@triton.jit
def code_place(column):
    """Return the byte of a packed row that holds a column's code, and the code's shift in it.

    Columns ``4 j .. 4 j + 3`` of the four planes of 32 columns of a block share word ``j``. The
    codes of planes 0 and 1 lie in the lower halves of its nibbles, those of planes 2 and 3 in the
    upper halves: masked with 0x33333333, a word is eight selectors of a byte permutation.
    """
    lane = column % LANES
    plane = column // LANES % 4
    byte = column // BLOCK * LANES + lane // 4 * 4 + plane % 2 * 2 + lane % 4 // 2
    return byte, lane % 2 * 4 + plane // 2 * 2


@triton.jit
def load_trits(packed, row_R, column_C, in_rows, row_bytes):
    """Load trits ``[R, C]`` as int32; rows out of range and padding give 0."""
    byte_C, shift_C = code_place(column_C)
    inside = both(in_rows, byte_C < row_bytes)
    place = packed + row_R.to(tl.int64)[:, None] * row_bytes + byte_C[None, :]
    byte = tl.load(place, mask=inside, other=EMPTY)
    code = (byte.to(tl.int32) >> shift_C[None, :]) & 3
    return code - 1


@triton.jit
def _store_bytes(stored, byte_RB, row_R, first_byte, in_rows, row_bytes):
    byte_B = first_byte + tl.arange(0, byte_RB.shape[1])
    inside = both(in_rows, byte_B < row_bytes)
    place = stored + row_R.to(tl.int64)[:, None] * row_bytes + byte_B[None, :]
    tl.store(place, byte_RB.to(tl.uint8), mask=inside)


@triton.jit
def store_trits(packed, trit_RC, row_R, first_column, in_rows, row_bytes):
    """Store trits ``[R, C]`` of whole blocks from ``first_column`` on; padding must be 0."""
    rows: tl.constexpr = trit_RC.shape[0]
    blocks: tl.constexpr = trit_RC.shape[1] // 128
    # Upper plane, odd plane, word, upper half, odd nibble: see code_place.
    code = tl.reshape(trit_RC + 1, (rows, blocks, 2, 2, 8, 2, 2))
    code = code << (4 * tl.arange(0, 2))[None, None, None, None, None, None, :]
    code = tl.sum(code, axis=6)
    code = code << (2 * tl.arange(0, 2))[None, None, :, None, None, None]
    code = tl.permute(tl.sum(code, axis=2), (0, 1, 3, 2, 4))
    byte = tl.reshape(code, (rows, blocks * 32))
    _store_bytes(packed, byte, row_R, first_column // 4, in_rows, row_bytes)


@triton.jit
def load_votes(votes, row_R, column_C, in_rows, columns, row_width, BITS: tl.constexpr):
    """Load accumulators ``[R, C]`` as int32; elements out of range give 0."""
    row = row_R.to(tl.int64)[:, None] * row_width
    if BITS == 8:
        inside = both(in_rows, column_C < columns)
        place = votes + row + column_C[None, :]
        return tl.load(place, mask=inside, other=0).to(tl.int32)
    elif BITS == 4:
        byte_C = column_C // BLOCK * 64 + column_C % 64
        inside = both(in_rows, byte_C < row_width)
        place = votes + row + byte_C[None, :]
        byte = tl.load(place, mask=inside, other=0x88).to(tl.int32)
        shift = column_C // 64 % 2 * 4
        return ((byte >> shift[None, :]) & 15) - 8
    else:
        return load_trits(votes, row_R, column_C, in_rows, row_width)


@triton.jit
def store_votes(
    votes,
    vote_RC,
    row_R,
    first_column,
    in_rows,
    columns,
    row_width,
    BITS: tl.constexpr,
):
    """Store accumulators ``[R, C]`` of columns from ``first_column`` on; padding must be 0."""
    if BITS == 8:
        column_C = first_column + tl.arange(0, vote_RC.shape[1])
        inside = both(in_rows, column_C < columns)
        place = flat_index(row_R, row_width, column_C)
        tl.store(votes + place, vote_RC.to(tl.int8), mask=inside)
    elif BITS == 4:
        rows: tl.constexpr = vote_RC.shape[0]
        blocks: tl.constexpr = vote_RC.shape[1] // 128
        halves = tl.reshape(vote_RC + 8, (rows, blocks, 2, 64))
        halves = halves << (4 * tl.arange(0, 2))[None, None, :, None]
        byte = tl.reshape(tl.sum(halves, axis=2), (rows, blocks * 64))
        _store_bytes(votes, byte, row_R, first_column // 2, in_rows, row_width)
    else:
        store_trits(votes, vote_RC, row_R, first_column, in_rows, row_width)
