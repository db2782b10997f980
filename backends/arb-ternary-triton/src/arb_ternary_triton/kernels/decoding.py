"""Turn words of packed codes into operands of products.

A word holds the codes of four neighbouring columns of each of the four planes of a block, see
:func:`arb_ternary_triton.kernels.common.code_place`. ``ISA`` says which instructions there are for
it; without any, as in the interpreter, the same values come from plain arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from arb_ternary_triton.kernels.common import power_of_two

#: Instruction sets: none but Triton's own, NVIDIA's, AMD's of the MI series and of the Radeons.
PLAIN = tl.constexpr(0)
NVIDIA = tl.constexpr(1)
CDNA = tl.constexpr(2)
RDNA = tl.constexpr(3)

#: One in each byte of a word.
ONES = tl.constexpr(0x01010101)
#: A selector of a byte permutation in each nibble.
SELECTORS = tl.constexpr(0x33333333)
#: Bytes -1, 0 and 1: what the codes 0, 1 and 2 stand for.
TRITS = tl.constexpr(0x000100FF)
_BYTES = tl.constexpr(0x00FF00FF)


@triton.jit
def dot4(code, x, acc, ISA: tl.constexpr):
    """Return ``acc`` plus the dot product of four unsigned bytes with four signed ones.

    AMD's instructions take the unsigned bytes as signed: they must be below 128.
    """
    if ISA == NVIDIA:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [code, x, acc],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    elif ISA == CDNA:
        return tl.inline_asm_elementwise(
            "v_dot4_i32_i8 $0, $1, $2, $3",
            "=v,v,v,v",
            [code, x, acc],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    elif ISA == RDNA:
        return tl.inline_asm_elementwise(
            "v_dot4_i32_iu8 $0, $1, $2, $3 neg_lo:[1,1,0]",
            "=v,v,v,v",
            [code, x, acc],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        for byte in tl.static_range(4):
            unsigned = (code >> (8 * byte)) & 255
            signed = (x << (24 - 8 * byte)) >> 24
            acc += unsigned * signed
        return acc


@triton.jit
def _permuted(a, b, selectors):
    """Return the bytes of ``a`` (0 to 3) and ``b`` (4 to 7) that the bytes of selectors say."""
    # The instruction takes the bytes of its second operand first.
    return tl.inline_asm_elementwise(
        "v_perm_b32 $0, $2, $1, $3",
        "=v,v,v,v",
        [a, b, selectors],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def every_second_byte(a, b, ODD: tl.constexpr, ISA: tl.constexpr):
    """Return the word of bytes 0 and 2 of ``a`` and of ``b``, or of bytes 1 and 3."""
    if ISA == NVIDIA:
        selector = tl.full(a.shape, 0x7531 if ODD else 0x6420, tl.int32)
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [a, b, selector],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    elif ISA != PLAIN:
        return _permuted(a, b, tl.full(a.shape, 0x07050301 if ODD else 0x06040200, tl.int32))
    else:
        a = (a >> (8 if ODD else 0)) & _BYTES
        b = (b >> (8 if ODD else 0)) & _BYTES
        a = (a | (a >> 8)) & 0xFFFF
        b = (b | (b >> 8)) & 0xFFFF
        return a | (b << 16)


@triton.jit
def quarters(word):
    """Split words ``[A, B, 8]`` into four ``[A, B, 2]``: one of each four neighbours."""
    a: tl.constexpr = word.shape[0]
    b: tl.constexpr = word.shape[1]
    even, odd = tl.split(tl.reshape(word, (a, b, 2, 2, 2)))
    word_0, word_2 = tl.split(even)
    word_1, word_3 = tl.split(odd)
    return word_0, word_1, word_2, word_3


@triton.jit
def trit_bytes(shift):
    """Return the bytes ``-1 << shift``, 0 and ``1 << shift`` in a word, for shifts of 0 to 6."""
    return (tl.full(shift.shape, TRITS, tl.int32) << shift) & _BYTES


@triton.jit
def banded_trits(trit, shift, BAND_START: tl.constexpr):
    """Return int8 trits shifted by the part of ``shift`` in a band of 7; 0 for other shifts."""
    within = shift - BAND_START
    in_band = (within >= 0) & (within < 7)
    shifted = trit << tl.where(in_band, within, 0).to(tl.int8)
    return tl.where(in_band, shifted, 0).to(tl.int8)


@triton.jit
def _four_times(x):
    """Return ``x [...]`` four times, ``[..., 4]``: a thread has the four side by side."""
    twice = tl.join(x, x)
    shape: tl.constexpr = x.shape + [4]  # noqa: RUF005
    return tl.reshape(tl.join(twice, twice), shape)


@triton.jit
def looked_up(table, selectors, ISA: tl.constexpr):
    """Return the bytes of ``table`` that the four lowest nibbles of ``selectors`` say.

    Args:
        table: bytes of :func:`trit_bytes`, int32, of the shape of ``selectors`` or one that
            broadcasts to it.
        selectors: int32 ``[...]``; each of its lowest nibbles is 0, 1 or 2.
        ISA: the instruction set.

    Returns:
        int8 ``[..., 4]``.
    """
    shape: tl.constexpr = selectors.shape + [4]  # noqa: RUF005
    if ISA == NVIDIA:
        table = _four_times(tl.broadcast_to(table, selectors.shape))
        selectors = _four_times(selectors)
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $5;",
            "=r,r,r,r,r,r,r,r,r",
            [table, selectors],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        quarter = tl.reshape(tl.arange(0, 4), [1] * (len(shape) - 1) + [4])
        if ISA == PLAIN:
            code = (tl.expand_dims(selectors, -1) >> (4 * quarter)) & 3
            return (tl.expand_dims(table, -1) >> (8 * code)).to(tl.int8)
        # AMD's permutation takes a selector from each byte.
        pairs = _permuted(
            selectors & 0x0303,
            (selectors >> 4) & 0x0303,
            tl.full(selectors.shape, 0x05010400, tl.int32),
        )
        bytes_of_four = _permuted(tl.broadcast_to(table, pairs.shape), pairs * 0, pairs)
        return (tl.expand_dims(bytes_of_four, -1) >> (8 * quarter)).to(tl.int8)


@triton.jit
def plane_selectors(word, PLANE: tl.constexpr):
    """Return words whose four lowest nibbles are the codes of a plane, as selectors."""
    half = (word >> (PLANE // 2 * 2)) & SELECTORS
    return half >> (PLANE % 2 * 16)


@triton.jit
def _prmt(a, b, SELECTOR: tl.constexpr):
    """Return the bytes of ``a`` (0 to 3) and ``b`` (4 to 7) that the nibbles of a number say."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [a, b, tl.full(a.shape, SELECTOR, tl.int32)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def transposed_trits(table, selectors, own_S):
    """Return looked-up bytes with rows side by side, for NVIDIA: int8 ``[32 S, N]``.

    Tensor cores take int8 operands only if the summed dimension is innermost. Four words of four
    rows are transposed in registers. Columns come in the order in which a thread has its part of
    the operand: see :func:`in_column_order`.

    Args:
        table: bytes by row and block, int32 ``[N, S]``.
        selectors: int32 ``[N, S, 8]``.
        own_S: any int32 ``[S]``. As an operand it keeps Triton from computing the last instruction
            for one of four equal columns.
    """
    rows: tl.constexpr = selectors.shape[0]
    blocks: tl.constexpr = selectors.shape[1]
    table = tl.broadcast_to(table[:, :, None], selectors.shape)
    word = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, $2;",
        "=r,r,r",
        [table, selectors],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    word = tl.permute(tl.reshape(word, (rows // 4, 2, 2, blocks, 8)), (0, 3, 4, 1, 2))
    even, odd = tl.split(word)
    row_0, row_2 = tl.split(even)
    row_1, row_3 = tl.split(odd)
    low = _prmt(row_0, row_1, 0x5140)
    next_low = _prmt(row_2, row_3, 0x5140)
    high = _prmt(row_0, row_1, 0x7362)
    next_high = _prmt(row_2, row_3, 0x7362)
    pair_0 = tl.join(_prmt(low, next_low, 0x5410), _prmt(low, next_low, 0x7632))
    pair_1 = tl.join(_prmt(high, next_high, 0x5410), _prmt(high, next_high, 0x7632))
    columns = tl.join(pair_0, pair_1)
    shape: tl.constexpr = columns.shape + [4]  # noqa: RUF005
    columns = tl.broadcast_to(tl.expand_dims(columns, -1), shape)
    trit = tl.inline_asm_elementwise(
        "mov.b32 $0, $1;",
        "=r,r,r,r,r,r,r,r,r",
        [columns, tl.broadcast_to(own_S[None, :, None, None, None, None], shape)],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )
    return tl.reshape(tl.permute(trit, (4, 1, 3, 2, 0, 5)), (32 * blocks, rows))


@triton.jit
def in_column_order(acc_CM):
    """Return the rows of a product with :func:`transposed_trits` in the order of the columns."""
    blocks: tl.constexpr = acc_CM.shape[0] // 32
    rows: tl.constexpr = acc_CM.shape[1]
    parts = tl.reshape(acc_CM, (2, blocks, 2, 8, rows))
    return tl.reshape(tl.permute(parts, (1, 3, 0, 2, 4)), (32 * blocks, rows))


@triton.jit
def scaled_trits(selectors, exponent, dtype: tl.constexpr):
    """Return the trits of :func:`plane_selectors` times ``2**exponent``, rounded to ``dtype``.

    Args:
        selectors: int32 ``[...]``.
        exponent: int32, of a shape that broadcasts to that of ``selectors``.
        dtype: a float type.

    Returns:
        ``dtype [..., 4]``.
    """
    unit = power_of_two(exponent)
    quarter = tl.reshape(tl.arange(0, 4), [1] * len(selectors.shape) + [4])
    trit = float_trits(tl.expand_dims(selectors, -1) >> (4 * quarter))
    return (trit * tl.expand_dims(unit, -1)).to(dtype)


@triton.jit
def float_trits(code):
    """Return the trits of the lowest two bits of int32 codes as float32."""
    # As the lowest bits of 2**23, a code is added to it.
    return ((code & 3) | 0x4B000000).to(tl.float32, bitcast=True) - 8388609.0
