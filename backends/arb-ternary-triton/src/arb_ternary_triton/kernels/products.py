"""Multiply by a packed weight: one row of activations, or tiles on tensor cores; look rows up.

Integer sums are taken in units of the smallest exponent of the summed elements (``floor``): a trit
is shifted left by ``E - floor`` before the product. Up to a shift of 6 it stays in int8 and sums in
int32 (``BANDS == 1``). Wider spreads are summed in int64, in bands of 7 shifts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from arb_ternary_triton.kernels.common import (
    BLOCK,
    EMPTY,
    LANES,
    both,
    flat_index,
    indices,
    load_trits,
    power_of_two,
)

#: Shifts that one band serves.
BAND = tl.constexpr(7)
#: One in each byte of a word, and the mask of a two-bit code in each.
ONES = tl.constexpr(0x01010101)
CODES = tl.constexpr(0x03030303)


@triton.jit
def _group(column, GROUP: tl.constexpr):
    """Return the group of a column; ``GROUP`` 0 means one exponent per row."""
    return column // GROUP if GROUP > 0 else column * 0


@triton.jit
def _dot_add(a, b, acc, weight_shift, BANDS: tl.constexpr, INT8: tl.constexpr):
    """Return ``acc + dot`` with the trits ``a`` shifted by ``weight_shift``, exactly."""
    if not INT8:
        return tl.dot(a, b, acc, input_precision="ieee")
    elif BANDS == 1:
        shifted = (a << weight_shift).to(tl.int8)
        return tl.dot(shifted, b, acc, out_dtype=tl.int32)
    else:
        for band in tl.static_range(BANDS):
            within = weight_shift - band * BAND
            in_band = (within >= 0) & (within < BAND)
            shifted = a << tl.where(in_band, within, 0)
            shifted = tl.where(in_band, shifted, 0).to(tl.int8)
            part = tl.dot(shifted, b, out_dtype=tl.int32)
            acc += part.to(tl.int64) << (band * BAND)
        return acc


@triton.jit
def _write(
    acc,
    scale,
    scale_stride,
    floor,
    bias,
    out,
    part,
    row_R,
    column_C,
    rows,
    columns,
    split,
    INT8: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Store the sums ``[R, C]`` in ``part[split]``, or scaled in ``out``."""
    inside = both(row_R < rows, column_C < columns)
    place = flat_index(row_R, columns, column_C)
    if SPLIT > 1:
        own_part = part + split.to(tl.int64) * rows * columns
        tl.store(own_part + place, acc, mask=inside)
    else:
        y = _scaled(
            acc,
            scale,
            scale_stride,
            floor,
            bias,
            row_R,
            column_C,
            rows,
            columns,
            INT8,
            BIAS,
        )
        tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scaled(
    acc,
    scale,
    scale_stride,
    floor,
    bias,
    row_R,
    column_C,
    rows,
    columns,
    INT8: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Return ``float32(acc) * scale * 2**floor + bias``, each operation rounded once."""
    y = acc.to(tl.float32)
    if INT8:
        scale_R = tl.load(scale + row_R * scale_stride, mask=row_R < rows, other=0.0)
        y = y * scale_R[:, None]
        floor_C = tl.load(floor + column_C, mask=column_C < columns, other=0)
        y = y * power_of_two(floor_C)[None, :]
    if BIAS:
        bias_C = tl.load(bias + column_C, mask=column_C < columns, other=0.0)
        y = y + bias_C[None, :]
    return y


@triton.jit
def _shifts(exponent, floor_R, row_R, block_S, plane, in_rows, groups, GROUP: tl.constexpr):
    """Return ``E - floor`` of a bit plane of some blocks: int32 ``[R, S, 1]``."""
    group_S = _group(block_S * BLOCK + plane * LANES, GROUP)
    inside = both(in_rows, group_S < groups)
    place = flat_index(row_R, groups, group_S)
    e = tl.load(exponent + place, mask=inside, other=0).to(tl.int32)
    shift = tl.where(inside, e - floor_R[:, None], 0)
    return shift[:, :, None]


@triton.jit
def linear_kernel(
    x,
    scale,
    packed,
    exponent,
    floor,
    bias,
    out,
    part,
    rows,
    outputs,
    columns,
    row_bytes,
    groups,
    blocks_per_split,
    GROUP: tl.constexpr,
    INT8: tl.constexpr,
    BANDS: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Compute ``x @ W.T``.

    The decoded weight is the left operand, in registers, so the kernel sums the transpose of the
    output.
    """
    output_N = indices(0, OUTPUTS)
    row_M = indices(1, ROWS)
    split = tl.program_id(2)
    in_outputs = output_N < outputs
    floor_N = tl.zeros((OUTPUTS,), tl.int32)
    if INT8:
        floor_N = tl.load(floor + output_N, mask=in_outputs, other=0)
        acc = tl.zeros((OUTPUTS, ROWS), tl.int32 if BANDS == 1 else tl.int64)
    else:
        acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    lane_L = tl.arange(0, LANES)
    blocks = row_bytes // LANES
    last = tl.minimum((split + 1) * blocks_per_split, blocks)

    for first in range(split * blocks_per_split, last, BLOCKS):
        block_S = first + tl.arange(0, BLOCKS)
        place = block_S[:, None] * LANES + lane_L[None, :]
        inside = in_outputs[:, None, None] & (block_S < last)[None, :, None]
        row_place = packed + output_N.to(tl.int64)[:, None, None] * row_bytes
        byte = tl.load(row_place + place[None, :, :], mask=inside, other=EMPTY)
        for plane in tl.static_range(4):
            trit = ((byte >> (2 * plane)) & 3).to(tl.int8) - 1
            column_SL = block_S[:, None] * BLOCK + plane * LANES + lane_L[None, :]
            column_C = tl.reshape(column_SL, (BLOCKS * LANES,))
            in_x = both(row_M < rows, column_C < columns)
            x_place = x + row_M.to(tl.int64)[:, None] * columns + column_C[None, :]
            x_MC = tl.load(x_place, mask=in_x, other=0)
            shift = _shifts(exponent, floor_N, output_N, block_S, plane, in_outputs, groups, GROUP)
            if INT8:
                shift = tl.broadcast_to(shift, trit.shape)
                shift = tl.reshape(shift, (OUTPUTS, BLOCKS * LANES))
                w = tl.reshape(trit, (OUTPUTS, BLOCKS * LANES))
                acc = _dot_add(w, tl.trans(x_MC), acc, shift.to(tl.int8), BANDS, True)
            else:
                w = trit.to(tl.float32) * power_of_two(shift)
                w = tl.reshape(w, (OUTPUTS, BLOCKS * LANES))
                acc = _dot_add(w.to(x_MC.dtype), tl.trans(x_MC), acc, shift, 1, False)

    _write(
        tl.trans(acc),
        scale,
        1,
        floor,
        bias,
        out,
        part,
        row_M,
        output_N,
        rows,
        outputs,
        split,
        INT8,
        SPLIT,
        BIAS,
    )


@triton.jit
def grad_input_kernel(
    grad,
    scale,
    packed,
    exponent,
    floor,
    out,
    part,
    rows,
    outputs,
    columns,
    row_bytes,
    groups,
    outputs_per_split,
    GROUP: tl.constexpr,
    INT8: tl.constexpr,
    BANDS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Compute ``grad @ W`` for one bit plane of some blocks of columns; ``floor`` is int32 [K]."""
    plane = tl.program_id(0) % 4
    block_S = tl.program_id(0) // 4 * BLOCKS + tl.arange(0, BLOCKS)
    row_M = indices(1, ROWS)
    split = tl.program_id(2)
    lane_L = tl.arange(0, LANES)
    column_SL = block_S[:, None] * BLOCK + plane * LANES + lane_L[None, :]
    column_C = tl.reshape(column_SL, (BLOCKS * LANES,))
    byte_SL = block_S[:, None] * LANES + lane_L[None, :]
    byte_C = tl.reshape(byte_SL, (BLOCKS * LANES,))
    group_C = _group(column_C, GROUP)
    floor_C = tl.zeros((BLOCKS * LANES,), tl.int32)
    if INT8:
        floor_C = tl.load(floor + column_C, mask=column_C < columns, other=0)
        acc = tl.zeros((BLOCKS * LANES, ROWS), tl.int32 if BANDS == 1 else tl.int64)
    else:
        acc = tl.zeros((BLOCKS * LANES, ROWS), tl.float32)
    last = tl.minimum((split + 1) * outputs_per_split, outputs)

    for first in range(split * outputs_per_split, last, OUTPUTS):
        output_N = first + tl.arange(0, OUTPUTS)
        in_outputs = output_N < last
        inside = both(in_outputs, column_C < columns)
        wide_N = output_N.to(tl.int64)[:, None]
        byte = tl.load(packed + wide_N * row_bytes + byte_C[None, :], mask=inside, other=EMPTY)
        trit = ((byte >> (2 * plane).to(tl.uint8)) & 3).to(tl.int8) - 1
        e = tl.load(exponent + wide_N * groups + group_C[None, :], mask=inside, other=0)
        e = e.to(tl.int32)
        in_grad = both(row_M < rows, in_outputs)
        grad_place = grad + row_M.to(tl.int64)[:, None] * outputs + output_N[None, :]
        g_MN = tl.load(grad_place, mask=in_grad, other=0)
        if INT8:
            shift = tl.where(inside, e - floor_C[None, :], 0).to(tl.int8)
            acc = _dot_add(tl.trans(trit), tl.trans(g_MN), acc, tl.trans(shift), BANDS, True)
        else:
            w = trit.to(tl.float32) * power_of_two(e)
            w = w.to(g_MN.dtype)
            acc = _dot_add(tl.trans(w), tl.trans(g_MN), acc, e, 1, False)

    _write(
        tl.trans(acc),
        scale,
        0,
        floor,
        floor,
        out,
        part,
        row_M,
        column_C,
        rows,
        columns,
        split,
        INT8,
        SPLIT,
        False,
    )


@triton.jit
def finish_kernel(
    part,
    scale,
    scale_stride,
    floor,
    bias,
    out,
    rows,
    columns,
    INT8: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum the parts of a product in their order, and scale."""
    row_R = indices(0, ROWS)
    column_C = indices(1, COLUMNS)
    inside = both(row_R < rows, column_C < columns)
    place = flat_index(row_R, columns, column_C)
    acc = tl.load(part + place, mask=inside, other=0)
    for split in range(1, SPLIT):
        own_part = part + tl.cast(split, tl.int64) * rows * columns
        acc += tl.load(own_part + place, mask=inside, other=0)
    y = _scaled(
        acc,
        scale,
        scale_stride,
        floor,
        bias,
        row_R,
        column_C,
        rows,
        columns,
        INT8,
        BIAS,
    )
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _dot4(code, x, acc, DP4A: tl.constexpr):
    """Return ``acc`` plus the dot product of four unsigned bytes with four signed ones."""
    if DP4A:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
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
def row_kernel(
    x,
    scale,
    packed,
    exponent,
    floor,
    bias,
    out,
    part,
    outputs,
    row_bytes,
    groups,
    blocks_per_split,
    GROUP: tl.constexpr,
    INT8: tl.constexpr,
    DP4A: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Compute ``x @ W.T`` for one row, padded to whole blocks.

    In int8 mode ``x`` and ``packed`` are words of four bytes. ``(word >> 2 p) & 0x03030303`` are
    the codes of four columns of plane ``p``. Codes exceed trits by 1. The sum of the activations
    corrects that once for all rows of the weight.
    """
    output_N = indices(0, OUTPUTS)
    split = tl.program_id(1)
    in_outputs = output_N < outputs
    words: tl.constexpr = 8 if INT8 else 32
    word_L = tl.arange(0, words)
    blocks = row_bytes // LANES
    last = tl.minimum((split + 1) * blocks_per_split, blocks)
    floor_N = tl.zeros((OUTPUTS,), tl.int32)
    if INT8:
        floor_N = tl.load(floor + output_N, mask=in_outputs, other=0)
    acc = tl.zeros((OUTPUTS, BLOCKS, words), tl.int32 if INT8 else tl.float32)

    for first in range(split * blocks_per_split, last, BLOCKS):
        block_S = first + tl.arange(0, BLOCKS)
        in_blocks = block_S < last
        inside = in_outputs[:, None, None] & in_blocks[None, :, None]
        row_place = output_N.to(tl.int64)[:, None, None] * (blocks * words)
        word_place = block_S[:, None] * words + word_L[None, :]
        place = row_place + word_place[None, :, :]
        word = tl.load(packed + place, mask=inside, other=0x55555555 if INT8 else EMPTY)
        if INT8:
            sums = tl.zeros((OUTPUTS, BLOCKS, words), tl.int32)
            ones = tl.zeros((1, BLOCKS, words), tl.int32)
            for plane in tl.static_range(4):
                in_x = in_blocks[:, None]
                x_place = x + block_S[:, None] * (4 * words) + plane * words + word_L[None, :]
                x_SL = tl.load(x_place, mask=in_x, other=0)
                x_SL = x_SL[None, :, :]
                ones = _dot4(tl.full((1, BLOCKS, words), ONES, tl.int32), x_SL, ones, DP4A)
                code = (word >> (2 * plane)) & CODES
                sums = _dot4(code, tl.broadcast_to(x_SL, code.shape), sums, DP4A)
                # Planes that share an exponent are shifted together.
                if plane == 3 or (GROUP > 0 and GROUP % 128 != 0):
                    shift = _shifts(
                        exponent,
                        floor_N,
                        output_N,
                        block_S,
                        plane,
                        in_outputs,
                        groups,
                        GROUP,
                    )
                    acc += (sums - ones) << shift
                    sums = tl.zeros((OUTPUTS, BLOCKS, words), tl.int32)
                    ones = tl.zeros((1, BLOCKS, words), tl.int32)
        else:
            for plane in tl.static_range(4):
                in_x = in_blocks[:, None]
                x_place = x + block_S[:, None] * BLOCK + plane * LANES + word_L[None, :]
                x_SL = tl.load(x_place, mask=in_x, other=0.0).to(tl.float32)
                trit = ((word >> (2 * plane)) & 3).to(tl.int8) - 1
                shift = _shifts(
                    exponent,
                    floor_N,
                    output_N,
                    block_S,
                    plane,
                    in_outputs,
                    groups,
                    GROUP,
                )
                w = trit.to(tl.float32) * power_of_two(shift)
                acc += w * x_SL[None, :, :]

    sums_by_block = tl.sum(acc, axis=2)
    total = tl.sum(sums_by_block, axis=1)[None, :]
    row = tl.arange(0, 1)
    _write(
        total,
        scale,
        1,
        floor,
        bias,
        out,
        part,
        row,
        output_N,
        1,
        outputs,
        split,
        INT8,
        SPLIT,
        BIAS,
    )


@triton.jit
def lookup_kernel(
    ids,
    packed,
    exponent,
    out,
    count,
    columns,
    row_bytes,
    groups,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Decode the rows ``W[ids]``."""
    place_R = indices(0, ROWS)
    column_C = indices(1, COLUMNS)
    in_rows = place_R < count
    id_R = tl.load(ids + place_R, mask=in_rows, other=0)
    trit = load_trits(packed, id_R, column_C, in_rows, row_bytes)
    inside = both(in_rows, column_C < columns)
    group_C = _group(column_C, GROUP)
    exponent_place = exponent + id_R[:, None] * groups + group_C[None, :]
    e = tl.load(exponent_place, mask=inside, other=0).to(tl.int32)
    value = trit.to(tl.float32) * power_of_two(e)
    place = flat_index(place_R, columns, column_C)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
