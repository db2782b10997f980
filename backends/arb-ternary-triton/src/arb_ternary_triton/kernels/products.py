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
    LANES,
    both,
    flat_index,
    indices,
    load_trits,
    power_of_two,
)
from arb_ternary_triton.kernels.decoding import (
    ONES,
    PLAIN,
    banded_trits,
    dot4,
    every_second_byte,
    in_column_order,
    looked_up,
    plane_selectors,
    quarters,
    scaled_trits,
    transposed_trits,
    trit_bytes,
)

#: Shifts that one band serves.
BAND = tl.constexpr(7)


@triton.jit
def _group(column, GROUP: tl.constexpr):
    """Return the group of a column; ``GROUP`` 0 means one exponent per row."""
    return column // GROUP if GROUP > 0 else column * 0


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
def _shifts(
    exponent,
    floor_N,
    output_N,
    block_S,
    plane: tl.constexpr,
    in_outputs,
    groups,
    GROUP: tl.constexpr,
):
    """Return ``E - floor`` of a plane of some blocks, int32 ``[N, S]``; 0 out of range."""
    group_S = _group(block_S * BLOCK + plane * LANES, GROUP)
    inside = both(in_outputs, group_S < groups)
    place = flat_index(output_N, groups, group_S)
    e = tl.load(exponent + place, mask=inside, other=0).to(tl.int32)
    return tl.where(inside, e - floor_N[:, None], 0)


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
    ISA: tl.constexpr,
    BANDS: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Compute ``x @ W.T``.

    The decoded weight is the left operand, in registers, so the kernel sums the transpose of the
    output. ``blocks_per_split`` is a multiple of ``BLOCKS``.
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
    blocks = row_bytes // LANES
    last = tl.minimum((split + 1) * blocks_per_split, blocks)
    row_place = packed + output_N.to(tl.int64)[:, None, None] * (blocks * 8)
    x_row_place = x + row_M.to(tl.int64)[:, None] * columns

    for first in range(split * blocks_per_split, last, BLOCKS):
        block_S = first + tl.arange(0, BLOCKS)
        place = block_S[:, None] * 8 + tl.arange(0, 8)[None, :]
        inside = in_outputs[:, None, None] & (block_S < last)[None, :, None]
        # What lies outside is multiplied by an activation of 0, or belongs to no row.
        word = tl.load(row_place + place[None, :, :], mask=inside, other=0)
        for plane in tl.static_range(4):
            selectors = plane_selectors(word, plane)
            column_SL = block_S[:, None] * BLOCK + plane * LANES + tl.arange(0, LANES)[None, :]
            column_C = tl.reshape(column_SL, (BLOCKS * LANES,))
            in_x = both(row_M < rows, column_C < columns)
            x_CM = tl.trans(tl.load(x_row_place + column_C[None, :], mask=in_x, other=0))
            # Planes that share an exponent read it once.
            if plane == 0 or (GROUP > 0 and GROUP % 128 != 0):
                shift = _shifts(
                    exponent, floor_N, output_N, block_S, plane, in_outputs, groups, GROUP
                )[:, :, None]
            if INT8:
                if BANDS == 1:
                    trit = looked_up(trit_bytes(shift), selectors, ISA)
                    w = tl.reshape(trit, (OUTPUTS, BLOCKS * LANES))
                    acc = tl.dot(w, x_CM, acc, out_dtype=tl.int32)
                else:
                    trit = looked_up(trit_bytes(shift * 0), selectors, PLAIN)
                    for band in tl.static_range(BANDS):
                        w = banded_trits(trit, shift[:, :, :, None], BAND * band)
                        w = tl.reshape(w, (OUTPUTS, BLOCKS * LANES))
                        part_sum = tl.dot(w, x_CM, out_dtype=tl.int32)
                        acc += part_sum.to(tl.int64) << (BAND * band)
            else:
                w = scaled_trits(selectors, shift, x_CM.dtype)
                w = tl.reshape(w, (OUTPUTS, BLOCKS * LANES))
                acc = tl.dot(w, x_CM, acc, input_precision="ieee")

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
    ISA: tl.constexpr,
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
    column_SL = block_S[:, None] * BLOCK + plane * LANES + tl.arange(0, LANES)[None, :]
    column_C = tl.reshape(column_SL, (BLOCKS * LANES,))
    first_column_S = block_S * BLOCK + plane * LANES
    in_columns = first_column_S < columns
    group_S = _group(first_column_S, GROUP)
    place = block_S[:, None] * 8 + tl.arange(0, 8)[None, :]
    in_words = block_S < row_bytes // LANES
    down = plane % 2 * 16 + plane // 2 * 2
    # Columns that share exponents share their floor.
    floor_S = tl.zeros((BLOCKS,), tl.int32)
    if INT8:
        floor_S = tl.load(floor + first_column_S, mask=in_columns, other=0)
        acc = tl.zeros((BLOCKS * LANES, ROWS), tl.int32 if BANDS == 1 else tl.int64)
    else:
        acc = tl.zeros((BLOCKS * LANES, ROWS), tl.float32)
    last = tl.minimum((split + 1) * outputs_per_split, outputs)
    transposed: tl.constexpr = INT8 and BANDS == 1 and ISA == 1

    # Places in a tile stay the same; only where the tile begins moves.
    row_N = tl.arange(0, OUTPUTS)
    word_place = row_N[:, None, None] * (row_bytes // 4) + place[None, :, :]
    e_place = row_N[:, None] * groups + group_S[None, :]
    # Rows outside are read as the last one, and not written: no mask of theirs is needed.
    inner_M = tl.minimum(row_M, rows - 1).to(tl.int64)
    grad_place = inner_M[:, None] * outputs + row_N[None, :]

    for first in range(split * outputs_per_split, last, OUTPUTS):
        start = tl.cast(first, tl.int64)
        in_outputs = first + row_N < last
        inside = in_outputs[:, None, None] & in_words[None, :, None]
        # What lies outside is multiplied by a gradient of 0, or belongs to no column.
        word = tl.load(packed + start * (row_bytes // 4) + word_place, mask=inside, other=0)
        selectors = (word >> down) & 0x3333
        in_exponents = both(in_outputs, in_columns)
        e = tl.load(exponent + start * groups + e_place, mask=in_exponents, other=0).to(tl.int32)
        g = tl.load(grad + start + grad_place, mask=in_outputs[None, :], other=0)
        g_NM = tl.trans(g)
        if INT8:
            shift = tl.where(in_exponents, e - floor_S[None, :], 0)
            if transposed:
                w = transposed_trits(trit_bytes(shift), selectors, floor_S)
                acc = tl.dot(w, g_NM, acc, out_dtype=tl.int32)
            elif BANDS == 1:
                trit = looked_up(trit_bytes(shift)[:, :, None], selectors, ISA)
                w = tl.reshape(trit, (OUTPUTS, BLOCKS * LANES))
                acc = tl.dot(tl.trans(w), g_NM, acc, out_dtype=tl.int32)
            else:
                trit = looked_up(trit_bytes(shift * 0)[:, :, None], selectors, PLAIN)
                for band in tl.static_range(BANDS):
                    w = banded_trits(trit, shift[:, :, None, None], BAND * band)
                    w = tl.reshape(w, (OUTPUTS, BLOCKS * LANES))
                    part_sum = tl.dot(tl.trans(w), g_NM, out_dtype=tl.int32)
                    acc += part_sum.to(tl.int64) << (BAND * band)
        else:
            w = scaled_trits(selectors, e[:, :, None], g_NM.dtype)
            w = tl.reshape(w, (OUTPUTS, BLOCKS * LANES))
            acc = tl.dot(tl.trans(w), g_NM, acc, input_precision="ieee")

    if transposed:
        acc = in_column_order(acc)
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
def _masked_dots(word, x, total, ones, SHIFT: tl.constexpr, ISA: tl.constexpr):
    """Add the dot product of the codes at a bit position, in units of 1/64, to ``total``.

    Four words in a row are summed before the sum is brought to these units. The codes stay where
    they are in their bytes, except where they would look negative to AMD's instructions.
    """
    down: tl.constexpr = 2 if ISA > 1 and SHIFT == 6 else 0
    mask: tl.constexpr = (3 * ONES << (SHIFT - down)) - (1 << 32 if SHIFT - down == 6 else 0)
    word_0, word_1, word_2, word_3 = word
    x_0, x_1, x_2, x_3 = quarters(x)
    one = tl.full(x_0.shape, ONES, tl.int32)
    ones = dot4(one, x_0, ones, ISA)
    ones = dot4(one, x_1, ones, ISA)
    ones = dot4(one, x_2, ones, ISA)
    ones = dot4(one, x_3, ones, ISA)
    sums = total * 0
    shape: tl.constexpr = total.shape
    sums = dot4((word_0 >> down) & mask, tl.broadcast_to(x_0, shape), sums, ISA)
    sums = dot4((word_1 >> down) & mask, tl.broadcast_to(x_1, shape), sums, ISA)
    sums = dot4((word_2 >> down) & mask, tl.broadcast_to(x_2, shape), sums, ISA)
    sums = dot4((word_3 >> down) & mask, tl.broadcast_to(x_3, shape), sums, ISA)
    return total + (sums << (6 - SHIFT + down)), ones


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
    ISA: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Compute ``x @ W.T`` for one row, padded to whole blocks; int8 ``x`` are words of four bytes.

    Codes exceed trits by 1. The sum of the activations corrects that once for all rows of the
    weight that a thread has.
    """
    output_N = indices(0, OUTPUTS)
    split = tl.program_id(1)
    in_outputs = output_N < outputs
    word_J = tl.arange(0, 8)
    blocks = row_bytes // LANES
    last = tl.minimum((split + 1) * blocks_per_split, blocks)
    row_place = packed + output_N.to(tl.int64)[:, None, None] * (blocks * 8)
    floor_N = tl.zeros((OUTPUTS,), tl.int32)
    if INT8:
        floor_N = tl.load(floor + output_N, mask=in_outputs, other=0)
        acc = tl.zeros((OUTPUTS, BLOCKS, 2), tl.int32)
    else:
        acc = tl.zeros((OUTPUTS, BLOCKS, 8, 4), tl.float32)

    for first in range(split * blocks_per_split, last, BLOCKS):
        block_S = first + tl.arange(0, BLOCKS)
        in_blocks = block_S < last
        inside = in_outputs[:, None, None] & in_blocks[None, :, None]
        place = block_S[:, None] * 8 + word_J[None, :]
        word = tl.load(row_place + place[None, :, :], mask=inside, other=0)
        if INT8:
            words = quarters(word)
            x_place = x + block_S[:, None] * 32 + word_J[None, :]
            total = tl.zeros((OUTPUTS, BLOCKS, 2), tl.int32)
            ones = tl.zeros((1, BLOCKS, 2), tl.int32)
            for half in tl.static_range(2):
                even = tl.load(x_place + 16 * half, mask=in_blocks[:, None], other=0)
                odd = tl.load(x_place + 16 * half + 8, mask=in_blocks[:, None], other=0)
                even = even[None, :, :]
                odd = odd[None, :, :]
                if GROUP > 0 and GROUP % 128 != 0:
                    # Each plane has its own exponents: the other one's activations are left out.
                    for plane in tl.static_range(2):
                        a = even if plane == 0 else even * 0
                        b = odd * 0 if plane == 0 else odd
                        total = tl.zeros((OUTPUTS, BLOCKS, 2), tl.int32)
                        ones = tl.zeros((1, BLOCKS, 2), tl.int32)
                        for nibble in tl.static_range(2):
                            x_J = every_second_byte(a, b, nibble, ISA)
                            total, ones = _masked_dots(
                                words, x_J, total, ones, 4 * nibble + 2 * half, ISA
                            )
                        shift = _shifts(
                            exponent,
                            floor_N,
                            output_N,
                            block_S,
                            2 * half + plane,
                            in_outputs,
                            groups,
                            GROUP,
                        )
                        acc += (total - (ones << 6)) >> (6 - shift)[:, :, None]
                else:
                    for nibble in tl.static_range(2):
                        x_J = every_second_byte(even, odd, nibble, ISA)
                        total, ones = _masked_dots(
                            words, x_J, total, ones, 4 * nibble + 2 * half, ISA
                        )
            if GROUP == 0 or GROUP % 128 == 0:
                shift = _shifts(exponent, floor_N, output_N, block_S, 0, in_outputs, groups, GROUP)
                acc += (total - (ones << 6)) >> (6 - shift)[:, :, None]
        else:
            for plane in tl.static_range(4):
                column = block_S[:, None] * BLOCK + plane * LANES + tl.arange(0, LANES)[None, :]
                x_SL = tl.load(x + column, mask=in_blocks[:, None], other=0.0).to(tl.float32)
                shift = _shifts(
                    exponent, floor_N, output_N, block_S, plane, in_outputs, groups, GROUP
                )
                w = scaled_trits(plane_selectors(word, plane), shift[:, :, None], tl.float32)
                acc += w * tl.reshape(x_SL, (1, BLOCKS, 8, 4))

    if INT8:
        sums_by_block = tl.sum(acc, axis=2)
    else:
        sums_by_block = tl.sum(tl.sum(acc, axis=3), axis=2)
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
