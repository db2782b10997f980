"""Where accumulators of 8, 4 and 2 bits are kept.

8 bits: int8 ``[N, K]``. 4 bits: words of 8 columns, column ``i`` of a word as the code ``a + 8`` in
bits ``4 i``. 2 bits: as trits. Rows of 4 and 2 bits are padded to whole words of trits, and what is
padded holds 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from arb_ternary.backends.protocol import VOTE_BITS, WeightShape
from arb_ternary_tilelang.arguments import packed_bytes, readable, require, words
from arb_ternary_tilelang.kernels import storage as programs
from arb_ternary_tilelang.lanes import lane_of


def kernels() -> dict[str, Callable[..., object]]:
    """The kernels of this module."""
    return {"pack_votes": pack_votes, "unpack_votes": unpack_votes}


def vote_dtype(bits: int) -> torch.dtype:
    """Of the stored accumulators."""
    return torch.int8 if bits == 8 else torch.uint8


def _row(columns: int, bits: int) -> int:
    return {8: columns, 4: 2 * packed_bytes(columns), 2: packed_bytes(columns)}[bits]


def stored_size(shape: WeightShape) -> tuple[int, int]:
    """Of the stored accumulators."""
    return shape.out_features, _row(shape.in_features, shape.vote_bits)


def held_votes(stored: Tensor, shape: WeightShape) -> Tensor:
    """Stored accumulators as a kernel takes them: int8, or words; no copy."""
    return stored if shape.vote_bits == 8 else words(stored)


def pack_votes(votes_NK: Tensor, bits: int = 8) -> Tensor:
    """int8 votes ``[N, K]`` to the layout of accumulators of so many bits."""
    require(bits in VOTE_BITS, f"bits must be one of {VOTE_BITS}, got {bits}")
    require(votes_NK.dim() == 2, f"votes must be [N, K], got {list(votes_NK.shape)}")
    rows, columns = votes_NK.shape
    votes = readable(votes_NK, "votes", torch.int8, (rows, columns), votes_NK.device)
    if bits == 8:
        return votes.clone(memory_format=torch.contiguous_format)
    out = torch.empty((rows, _row(columns, bits)), dtype=torch.uint8, device=votes.device)
    if out.numel():
        program = programs.pack_nibbles if bits == 4 else programs.pack
        lane_of(votes.device).kernel(program, N=rows, K=columns)(votes, words(out))
    return out


def unpack_votes(votes: Tensor, shape: WeightShape) -> Tensor:
    """Stored accumulators to int8 ``[N, K]``, memory of their own."""
    stored = readable(votes, "votes", vote_dtype(shape.vote_bits), stored_size(shape), votes.device)
    if shape.vote_bits == 8:
        return stored.clone(memory_format=torch.contiguous_format)
    rows = shape.out_features
    columns = shape.in_features
    out = torch.empty((rows, columns), dtype=torch.int8, device=votes.device)
    if out.numel():
        program = programs.unpack_nibbles if shape.vote_bits == 4 else programs.unpack
        lane_of(votes.device).kernel(program, N=rows, K=columns)(words(stored), out)
    return out
