"""Arithmetic on words of four bytes: four accumulators or four trits at a time.

A word holds four neighbouring columns, the first in its lowest byte. Accumulators are kept as a
size of at most 128 and a sign, 0xFF in the bytes of negative ones, so that no sum of two bytes
leaves its byte.
"""

from __future__ import annotations

import triton
import triton.language as tl

from arb_ternary_triton.kernels.common import floor_of
from arb_ternary_triton.kernels.decoding import NVIDIA, PLAIN, TRITS, dot4

#: One in each byte of a word.
ONES = tl.constexpr(0x01010101)
_HIGHEST = tl.constexpr(0x80808080)
_LOWER = tl.constexpr(0x7F7F7F7F)
#: A word of four zero trits.
_EMPTY = tl.constexpr(0x55555555)


@triton.jit
def in_words(value_RC):
    """Put int32 numbers that fit in a byte into words ``[R, C / 4]``."""
    rows: tl.constexpr = value_RC.shape[0]
    columns: tl.constexpr = value_RC.shape[1]
    byte = tl.reshape(value_RC.to(tl.uint32) & 255, (rows, columns // 4, 4))
    return tl.sum(byte << (8 * tl.arange(0, 4)).to(tl.uint32)[None, None, :], axis=2)


@triton.jit
def from_words(word):
    """Return the int8 numbers in words as int32 ``[R, C]``."""
    rows: tl.constexpr = word.shape[0]
    columns: tl.constexpr = word.shape[1] * 4
    byte = word[:, :, None] >> (8 * tl.arange(0, 4)).to(tl.uint32)[None, None, :]
    return tl.reshape(byte.to(tl.int8), (rows, columns)).to(tl.int32)


@triton.jit
def sizes_and_signs(word, ISA: tl.constexpr):
    """Return the absolute values of four int8, and 0xFF in the bytes of negative ones."""
    if ISA == NVIDIA:
        # The highest bit of a selector asks for the sign of a byte, eight times.
        sign = permuted(word, word, 0xBA98)
    else:
        sign = ((word >> 7) & ONES) * 255
    return (word ^ sign) + (sign & ONES), sign


@triton.jit
def with_signs(size, sign):
    """Return four int8 from what :func:`sizes_and_signs` returns."""
    complement = size ^ sign
    return ((complement & _LOWER) + (sign & ONES)) ^ (complement & _HIGHEST)


@triton.jit
def nearer_to_zero(word, lost, sign):
    """Return four int8 less what they lose of their absolute values, which is not more than all.

    Seen as numbers from 0 on, none leaves its byte: the words can be added whole.
    """
    return ((word ^ _HIGHEST) - (lost ^ sign) + sign) ^ _HIGHEST


@triton.jit
def at_least(size, least):
    """Return 0x80 in the bytes of sizes that are at least ``least``, a number in 1..128."""
    return (size + (128 - least).to(tl.uint32) * ONES) & _HIGHEST


@triton.jit
def filled(bits):
    """Return 0xFF in the bytes that are 1 rather than 0."""
    return bits * 255


@triton.jit
def plus_byte_times(addend, word, factor, BYTE: tl.constexpr, ISA: tl.constexpr):
    """Return ``addend`` plus a byte of ``word`` times ``factor``, a number below 2**16."""
    if ISA == NVIDIA:
        # The instruction takes two bytes times the halves of its first operand.
        halves = tl.zeros_like(word) + (factor << (BYTE % 2 * 16))
        asm: tl.constexpr = (
            "dp2a.lo.u32.u32 $0, $1, $2, $3;" if BYTE < 2 else "dp2a.hi.u32.u32 $0, $1, $2, $3;"
        )
        return tl.inline_asm_elementwise(
            asm,
            "=r,r,r,r",
            [halves, word, addend],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        return addend + ((word >> (8 * BYTE)) & 255) * factor


@triton.jit
def third_bytes(word_0, word_1, word_2, word_3, ISA: tl.constexpr):
    """Return the word of the third lowest bytes of four words below 2**24."""
    if ISA == NVIDIA:
        low = permuted(word_0, word_1, 0x0062)
        high = permuted(word_2, word_3, 0x0062)
        return permuted(low, high, 0x5410)
    else:
        low = (word_0 >> 16) | ((word_1 >> 16) << 8)
        return low | (word_2 & 0xFF0000) | ((word_3 & 0xFF0000) << 8)


@triton.jit
def permuted(a, b, SELECTOR: tl.constexpr):
    """Return the bytes of ``a`` (0 to 3) and ``b`` (4 to 7) that the nibbles of a number say."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [a, b, tl.full(a.shape, SELECTOR, tl.int32)],
        dtype=a.dtype,
        is_pure=True,
        pack=1,
    )


@triton.jit
def word_pointers(base, row_R, row_bytes, word_W):
    """Return pointers ``[R, W]`` to words of rows of ``row_bytes`` bytes."""
    words = base.to(tl.pointer_type(tl.uint32))
    return words + row_R.to(tl.int64)[:, None] * (row_bytes // 4) + word_W[None, :]


@triton.jit
def _code_place(word_W):
    """Return where the codes of a word of columns are: a word of a packed row, and a shift in it.

    See :func:`arb_ternary_triton.kernels.common.code_place`.
    """
    plane = word_W // 8 % 4
    return word_W // 32 * 8 + word_W % 8, plane % 2 * 16 + plane // 2 * 2


@triton.jit
def _load_nibbles(packed, row_R, word_W, in_rows, row_bytes):
    """Load the codes of columns into the four lowest nibbles of words; out of range they are 1."""
    place_W, shift_W = _code_place(word_W)
    inside = in_rows[:, None] & (place_W < row_bytes // 4)[None, :]
    stored = tl.load(word_pointers(packed, row_R, row_bytes, place_W), mask=inside, other=_EMPTY)
    return (stored >> shift_W.to(tl.uint32)[None, :]) & 0x3333


@triton.jit
def laid_out_like(value, like, ISA: tl.constexpr):
    """Return ``value``, each of its elements in the thread that has this element of ``like``.

    Otherwise Triton would compute sums and votes in two layouts. The instruction costs nothing.
    """
    if ISA == NVIDIA and value.dtype.primitive_bitwidth == 32:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;",
            "=r,r,r",
            [value, like],
            dtype=value.dtype,
            is_pure=True,
            pack=1,
        )
    else:
        return value


@triton.jit
def load_codes(packed, row_R, word_W, in_rows, row_bytes):
    """Load the codes of columns, four in a word; those out of range are 1."""
    nibbles = _load_nibbles(packed, row_R, word_W, in_rows, row_bytes)
    pairs = (nibbles | (nibbles << 8)) & 0x00FF00FF
    return (pairs | (pairs << 4)) & 0x03030303


@triton.jit
def load_trit_bytes(packed, row_R, word_W, in_rows, row_bytes, ISA: tl.constexpr):
    """Load the trits of columns as int8, four in a word; those out of range are 0."""
    nibbles = _load_nibbles(packed, row_R, word_W, in_rows, row_bytes)
    if ISA == NVIDIA:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;",
            "=r,r,r",
            [tl.full(nibbles.shape, TRITS, tl.uint32), nibbles],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        pairs = (nibbles | (nibbles << 8)) & 0x00FF00FF
        code = (pairs | (pairs << 4)) & 0x03030303
        # 0, 1 and 2 become -1, 0 and 1: the highest bit keeps a byte from borrowing.
        return ((code | _HIGHEST) - ONES) ^ _HIGHEST


@triton.jit
def signed_dot(a, b, ISA: tl.constexpr):
    """Return the int32 dot products of four signed bytes each."""
    zero = tl.zeros(a.shape, tl.int32)
    if ISA == NVIDIA:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [a, b, zero],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    elif ISA != PLAIN:
        return dot4(a, b, zero, ISA)
    else:
        for byte in tl.static_range(4):
            zero += signed_byte(a, byte, ISA) * signed_byte(b, byte, ISA)
        return zero


@triton.jit
def signed_byte(word, BYTE: tl.constexpr, ISA: tl.constexpr):
    """Return a byte of words as a signed number, int32."""
    if ISA == NVIDIA:
        return permuted(word, word, 0x8880 + 0x1111 * BYTE).to(tl.int32, bitcast=True)
    else:
        return (word << (24 - 8 * BYTE)).to(tl.int32, bitcast=True) >> 24


@triton.jit
def saturated_word(part_0, part_1, part_2, part_3, ISA: tl.constexpr):
    """Return words of int32 numbers clipped to -128..127."""
    if ISA == NVIDIA:
        return tl.inline_asm_elementwise(
            "cvt.pack.sat.s8.s32.b32 $0, $4, $3, 0; cvt.pack.sat.s8.s32.b32 $0, $2, $1, $0;",
            "=&r,r,r,r,r",
            [part_0, part_1, part_2, part_3],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        low = _clipped_byte(part_0) | (_clipped_byte(part_1) << 8)
        return low | (_clipped_byte(part_2) << 16) | (_clipped_byte(part_3) << 24)


@triton.jit
def _clipped_byte(part):
    return tl.minimum(tl.maximum(part, -128), 127).to(tl.uint32, bitcast=True) & 255


@triton.jit
def upper_bits(bits, width, addend, ISA: tl.constexpr):
    """Return the upper bits of words, as a number below ``width``, a power of two, plus addend."""
    if ISA == NVIDIA:
        zero = tl.zeros(bits.shape, tl.int32)
        return tl.inline_asm_elementwise(
            "mad.hi.u32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [bits, zero + width, zero + addend],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        product = bits.to(tl.uint64) * width.to(tl.uint64)
        return (product >> 32).to(tl.int32) + addend


@triton.jit
def absolute(x, ISA: tl.constexpr):
    """Return the absolute values of int32 numbers, in one instruction where there is one."""
    if ISA == NVIDIA:
        return tl.inline_asm_elementwise(
            "abs.s32 $0, $1;",
            "=r,r",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.abs(x)


@triton.jit
def ceiling(x, ISA: tl.constexpr):
    """Return ``ceil(x)`` in int32 of float32 below 2**31, and 0 of NaN."""
    if ISA == NVIDIA:
        return tl.inline_asm_elementwise(
            "cvt.rpi.s32.f32 $0, $1;",
            "=r,r",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return -floor_of(tl.where(x != x, 0.0, -x))


@triton.jit
def store_codes(packed, code, row_R, first_word, in_rows, row_bytes):
    """Store the codes of whole blocks of columns from ``first_word`` on."""
    rows: tl.constexpr = code.shape[0]
    blocks: tl.constexpr = code.shape[1] // 32
    _, shift_W = _code_place(tl.arange(0, code.shape[1]))
    pairs = (code | (code >> 4)) & 0x00330033
    nibbles = (pairs | (pairs >> 8)) & 0x3333
    planes = tl.reshape(nibbles << shift_W.to(tl.uint32)[None, :], (rows, blocks, 4, 8))
    stored = tl.reshape(tl.sum(planes, axis=2), (rows, blocks * 8))
    place = first_word // 4 + tl.arange(0, blocks * 8)
    inside = in_rows[:, None] & (place < row_bytes // 4)[None, :]
    tl.store(word_pointers(packed, row_R, row_bytes, place), stored, mask=inside)
