"""Convert to and from the layout of packed weights and narrow accumulators."""

from __future__ import annotations

import torch
from torch import Tensor

from arb_ternary.backends.arguments import vote_dtype
from arb_ternary.backends.protocol import WeightShape
from arb_ternary_triton.arguments import check_packed, check_readable, packed_columns, vote_columns
from arb_ternary_triton.kernels.layout import pack_kernel, unpack_kernel
from arb_ternary_triton.launch import cdiv, launch
from arb_ternary_triton.tiles import elementwise


def vote_size(shape: WeightShape) -> tuple[int, int]:
    """Return the size of a tensor of stored accumulators."""
    return shape.out_features, vote_columns(shape.in_features, shape.vote_bits)


def _pack(values_NK: Tensor, width: int, bits: int) -> Tensor:
    if values_NK.dim() != 2:
        raise ValueError(f"a matrix is packed, got {list(values_NK.shape)}")
    rows, columns = values_NK.shape
    check_readable(values_NK[:0], "values", torch.int8, (0, columns))
    values = values_NK.resolve_neg()
    row_stride, column_stride = values.stride()
    stored = torch.empty((rows, width), dtype=torch.uint8, device=values.device)
    tile = elementwise(rows, columns)
    # Values are not checked: the host would wait for the device in every repacking.
    launch(
        pack_kernel,
        (cdiv(rows, tile.rows), cdiv(columns, tile.columns)),
        values,
        stored,
        rows,
        columns,
        row_stride,
        column_stride,
        width,
        BITS=bits,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
    )
    return stored


def _unpack(stored: Tensor, shape: WeightShape, bits: int) -> Tensor:
    rows = shape.out_features
    columns = shape.in_features
    values = torch.empty((rows, columns), dtype=torch.int8, device=stored.device)
    tile = elementwise(rows, columns)
    launch(
        unpack_kernel,
        (cdiv(rows, tile.rows), cdiv(columns, tile.columns)),
        stored,
        values,
        rows,
        columns,
        stored.shape[1],
        BITS=bits,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
    )
    return values


def pack(trits_NK: Tensor) -> Tensor:
    """Pack int8 trits ``[N, K]`` into uint8 ``[N, 32 * ceil(K / 128)]``."""
    return _pack(trits_NK, packed_columns(trits_NK.shape[-1]), 2)


def unpack(packed: Tensor, shape: WeightShape) -> Tensor:
    """Unpack a weight into int8 trits ``[N, K]``."""
    return _unpack(check_packed(packed, shape), shape, 2)


def pack_votes(votes_NK: Tensor, bits: int = 8) -> Tensor:
    """Convert int8 votes ``[N, K]`` to the backend's layout.

    Votes of 8 bits stay int8. Narrower votes become bytes of whole blocks of 128 columns.
    """
    if bits == 8:
        return votes_NK.clone(memory_format=torch.contiguous_format)
    return _pack(votes_NK, vote_columns(votes_NK.shape[-1], bits), bits)


def unpack_votes(votes: Tensor, shape: WeightShape) -> Tensor:
    """Convert the backend's layout of votes to a new int8 tensor ``[N, K]``."""
    stored = check_readable(votes, "votes", vote_dtype(shape), vote_size(shape))
    if shape.vote_bits == 8:
        return stored.clone()
    return _unpack(stored, shape, shape.vote_bits)
