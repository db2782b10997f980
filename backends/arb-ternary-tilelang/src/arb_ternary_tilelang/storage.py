"""The layout of accumulators of 8, 4 and 2 bits.

8 bits: int8 ``[N, K]``. 4 bits: words of 8 columns, column ``i`` of a word as the code ``a + 8`` in
bits ``4 i``. 2 bits: as trits. Rows of 4 and 2 bits are padded to whole words of trits; the padding
holds 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from arb_ternary.backends.arguments import vote_dtype
from arb_ternary.backends.protocol import VOTE_BITS, WeightShape
from arb_ternary_tilelang.arguments import packed_bytes, readable, require, words
from arb_ternary_tilelang.kernels import storage as programs
from arb_ternary_tilelang.lane import lane_of


def kernels() -> dict[str, Callable[..., object]]:
    """Return the kernels of this module by op."""
    return {"pack_votes": pack_votes, "unpack_votes": unpack_votes}


def _row(columns: int, bits: int) -> int:
    """Stored elements of a row."""
    if bits == 8:
        return columns
    if bits == 4:
        return 2 * packed_bytes(columns)
    return packed_bytes(columns)


def stored_size(shape: WeightShape) -> tuple[int, int]:
    """The size of the stored accumulators."""
    row = _row(shape.in_features, shape.vote_bits)
    return shape.out_features, row


def held_votes(stored: Tensor, shape: WeightShape) -> Tensor:
    """Stored accumulators as a kernel takes them, int8 or words, without a copy."""
    lane = lane_of(stored.device)
    if shape.vote_bits == 8 and not lane.whole_words(shape.in_features):
        return stored
    return words(stored)


def pack_votes(votes_NK: Tensor, bits: int = 8) -> Tensor:
    """Convert int8 votes ``[N, K]`` to the layout of accumulators of so many bits."""
    require(bits in VOTE_BITS, f"bits must be one of {VOTE_BITS}, got {bits}")
    require(votes_NK.dim() == 2, f"votes must be [N, K], got {list(votes_NK.shape)}")
    rows, columns = votes_NK.shape
    votes = readable(votes_NK, "votes", torch.int8, (rows, columns), votes_NK.device)
    if bits == 8:
        return votes.clone(memory_format=torch.contiguous_format)
    out = torch.empty((rows, _row(columns, bits)), dtype=torch.uint8, device=votes.device)
    if out.numel():
        program = programs.pack_nibbles if bits == 4 else programs.pack
        lane = lane_of(votes.device)
        kernel = lane.kernel(program, N=rows, K=columns)
        kernel(votes, words(out))
    return out


def unpack_votes(votes: Tensor, shape: WeightShape) -> Tensor:
    """Convert stored accumulators to int8 ``[N, K]`` in new memory."""
    dtype = vote_dtype(shape)
    size = stored_size(shape)
    stored = readable(votes, "votes", dtype, size, votes.device)
    if shape.vote_bits == 8:
        return stored.clone(memory_format=torch.contiguous_format)
    rows = shape.out_features
    columns = shape.in_features
    out = torch.empty((rows, columns), dtype=torch.int8, device=votes.device)
    if out.numel():
        program = programs.unpack_nibbles if shape.vote_bits == 4 else programs.unpack
        lane = lane_of(votes.device)
        kernel = lane.kernel(program, N=rows, K=columns)
        kernel(words(stored), out)
    return out
