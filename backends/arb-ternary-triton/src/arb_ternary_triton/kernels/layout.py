"""Convert between the stored layouts and plain int8 matrices."""

from __future__ import annotations

import triton
import triton.language as tl

from arb_ternary_triton.kernels.common import both, flat_index, indices, load_votes, store_votes


@triton.jit
def pack_kernel(
    values,
    stored,
    rows,
    columns,
    row_stride,
    column_stride,
    row_width,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Pack int8 ``[N, K]`` with any strides into the stored layout."""
    row_R = indices(0, ROWS)
    first = tl.program_id(1) * COLUMNS
    column_C = first + tl.arange(0, COLUMNS)
    in_rows = row_R < rows
    inside = both(in_rows, column_C < columns)
    row_place = row_R.to(tl.int64)[:, None] * row_stride
    place = row_place + column_C.to(tl.int64)[None, :] * column_stride
    value = tl.load(values + place, mask=inside, other=0).to(tl.int32)
    store_votes(stored, value, row_R, first, in_rows, columns, row_width, BITS)


@triton.jit
def unpack_kernel(
    stored,
    values,
    rows,
    columns,
    row_width,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Unpack the stored layout into a contiguous int8 ``[N, K]``."""
    row_R = indices(0, ROWS)
    column_C = indices(1, COLUMNS)
    in_rows = row_R < rows
    value = load_votes(stored, row_R, column_C, in_rows, columns, row_width, BITS)
    inside = both(in_rows, column_C < columns)
    place = flat_index(row_R, columns, column_C)
    tl.store(values + place, value.to(tl.int8), mask=inside)
