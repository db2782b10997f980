"""Code that the kernels share: layouts, powers of two, the counter hash."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)
LANES = tl.constexpr(32)
#: A byte of four zero trits.
EMPTY = tl.constexpr(0x55)


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
    x = index.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32, bitcast=True)
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
        index = row.to(tl.uint32) * tl.cast(width, tl.uint32) + column.to(tl.uint32)
        return draw(index, key)


@triton.jit
def load_trits(packed, row_R, column_C, in_rows, row_bytes):
    """Load trits ``[R, C]`` as int32; rows out of range and padding give 0."""
    byte_C = column_C // BLOCK * LANES + column_C % LANES
    inside = both(in_rows, byte_C < row_bytes)
    place = packed + row_R.to(tl.int64)[:, None] * row_bytes + byte_C[None, :]
    byte = tl.load(place, mask=inside, other=EMPTY)
    shift = column_C // LANES % 4 * 2
    code = (byte.to(tl.int32) >> shift[None, :]) & 3
    return code - 1


@triton.jit
def pack_planes(code_RC, PLANES: tl.constexpr):
    """Pack codes of ``8 / PLANES`` bits into bytes, int32 ``[R, C / PLANES]``.

    The planes of a block lie one after the other.
    """
    rows: tl.constexpr = code_RC.shape[0]
    width: tl.constexpr = code_RC.shape[1] // PLANES
    blocks: tl.constexpr = code_RC.shape[1] // 128
    planes = tl.reshape(code_RC, (rows, blocks, PLANES, width // blocks))
    shift = tl.arange(0, PLANES) * (8 // PLANES)
    shifted = planes << shift[None, None, :, None]
    return tl.reshape(tl.sum(shifted, axis=2), (rows, width))


@triton.jit
def _store_planes(stored, code_RC, row_R, first_column, in_rows, row_bytes, PLANES: tl.constexpr):
    width: tl.constexpr = code_RC.shape[1] // PLANES
    byte_C = first_column // PLANES + tl.arange(0, width)
    inside = both(in_rows, byte_C < row_bytes)
    byte = pack_planes(code_RC, PLANES).to(tl.uint8)
    place = stored + row_R.to(tl.int64)[:, None] * row_bytes + byte_C[None, :]
    tl.store(place, byte, mask=inside)


@triton.jit
def store_trits(packed, trit_RC, row_R, first_column, in_rows, row_bytes):
    """Store trits ``[R, C]`` of whole blocks from ``first_column`` on; padding must be 0."""
    _store_planes(packed, trit_RC + 1, row_R, first_column, in_rows, row_bytes, 4)


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
        _store_planes(votes, vote_RC + 8, row_R, first_column, in_rows, row_width, 2)
    else:
        store_trits(votes, vote_RC, row_R, first_column, in_rows, row_width)
