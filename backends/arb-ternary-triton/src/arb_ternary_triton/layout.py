"""To and from the layout of packed weights and narrow accumulators."""

from __future__ import annotations

import torch
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape
from arb_ternary_triton.arguments import check_packed, check_readable, packed_columns, vote_columns
from arb_ternary_triton.kernels.layout import pack_kernel, unpack_kernel
from arb_ternary_triton.launch import cdiv, launch
from arb_ternary_triton.tiles import elementwise


def vote_size(shape: WeightShape) -> tuple[int, int]:
    """Shape of a tensor of accumulators."""
    return shape.out_features, vote_columns(shape.in_features, shape.vote_bits)


def _pack(values_NK: Tensor, width: int, bits: int) -> Tensor:
    if values_NK.dim() != 2:
        raise ValueError(f"a matrix is packed, got {list(values_NK.shape)}")
    rows, columns = values_NK.shape
    check_readable(values_NK[:0], "values", torch.int8, (0, columns))
    values = values_NK.resolve_neg()
    stored = torch.empty((rows, width), dtype=torch.uint8, device=values.device)
    tile = elementwise(rows, columns)
    grid = (cdiv(rows, tile.rows), cdiv(columns, tile.columns))
    arguments = (rows, columns, *values.stride(), width)
    # Values are not checked: that would make the host wait for the device in every repacking.
    launch(
        pack_kernel,
        grid,
        values,
        stored,
        *arguments,
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
    grid = (cdiv(rows, tile.rows), cdiv(columns, tile.columns))
    arguments = (rows, columns, stored.shape[1])
    launch(
        unpack_kernel,
        grid,
        stored,
        values,
        *arguments,
        BITS=bits,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
    )
    return values


def pack(trits_NK: Tensor) -> Tensor:
    """int8 trits ``[N, K]`` to uint8 ``[N, 32 * ceil(K / 128)]``."""
    return _pack(trits_NK, packed_columns(trits_NK.shape[-1]), 2)


def unpack(packed: Tensor, shape: WeightShape) -> Tensor:
    """A packed weight to int8 trits ``[N, K]``."""
    return _unpack(check_packed(packed, shape), shape, 2)


def pack_votes(votes_NK: Tensor, bits: int = 8) -> Tensor:
    """int8 votes ``[N, K]`` to the backend's layout: int8 for 8 bits, else bytes of whole blocks of
    128 columns.
    """
    if bits == 8:
        return votes_NK.clone(memory_format=torch.contiguous_format)
    return _pack(votes_NK, vote_columns(votes_NK.shape[-1], bits), bits)


def unpack_votes(votes: Tensor, shape: WeightShape) -> Tensor:
    """The backend's layout of votes to int8 ``[N, K]``, memory of its own."""
    if shape.vote_bits == 8:
        return check_readable(votes, "votes", torch.int8, vote_size(shape)).clone()
    return _unpack(
        check_readable(votes, "votes", torch.uint8, vote_size(shape)), shape, shape.vote_bits
    )
