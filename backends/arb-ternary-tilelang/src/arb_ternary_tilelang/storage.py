"""The layout of trits, and of accumulators of 8, 4 and 2 bits.

Accumulators of 8 bits: int8 ``[N, K]``. 4 bits: words of 8 columns, column ``i`` of a word as the
code ``a + 8`` in bits ``4 i``. 2 bits: as trits. Rows of 4 and 2 bits are padded to whole words of
trits; the padding holds 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from arb_ternary.backends.arguments import check_groups, vote_dtype
from arb_ternary.backends.protocol import VOTE_BITS, WeightShape
from arb_ternary_tilelang.arguments import UNIT, packed_bytes, readable, require, words
from arb_ternary_tilelang.kernels import storage as programs
from arb_ternary_tilelang.lane import lane_of


def kernels() -> dict[str, Callable[..., object]]:
    """Return the kernels of this module by op."""
    return {
        "pack": pack,
        "unpack": unpack,
        "pack_votes": pack_votes,
        "unpack_votes": unpack_votes,
    }


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


def _stored(values_NK: Tensor, name: str, bits: int) -> Tensor:
    """Store int8 ``[N, K]`` in codes of 4 or 2 bits."""
    rows, columns = values_NK.shape
    values = readable(values_NK, name, torch.int8, (rows, columns), values_NK.device)
    out = torch.empty((rows, _row(columns, bits)), dtype=torch.uint8, device=values.device)
    if out.numel():
        program = programs.pack_nibbles if bits == 4 else programs.pack
        kernel = lane_of(values.device).kernel(program, N=rows, K=columns)
        kernel(values, words(out))
    return out


def _opened(stored: Tensor, shape: WeightShape, bits: int) -> Tensor:
    """Return stored codes of 4 or 2 bits as int8 ``[N, K]``."""
    rows = shape.out_features
    columns = shape.in_features
    out = torch.empty((rows, columns), dtype=torch.int8, device=stored.device)
    if out.numel():
        program = programs.unpack_nibbles if bits == 4 else programs.unpack
        kernel = lane_of(stored.device).kernel(program, N=rows, K=columns)
        kernel(words(stored), out)
    return out


def packed_weight(packed: Tensor, shape: WeightShape) -> Tensor:
    """Check a packed weight and return it, contiguous."""
    check_groups(shape, UNIT)
    size = (shape.out_features, packed_bytes(shape.in_features))
    return readable(packed, "packed", torch.uint8, size, packed.device)


def pack(trits_NK: Tensor) -> Tensor:
    """Pack int8 trits ``[N, K]`` into uint8 ``[N, 4 * ceil(K / 16)]``."""
    require(trits_NK.dim() == 2, f"trits must be [N, K], got {list(trits_NK.shape)}")
    return _stored(trits_NK, "trits", 2)


def unpack(packed: Tensor, shape: WeightShape) -> Tensor:
    """Unpack a packed weight to int8 trits ``[N, K]``."""
    return _opened(packed_weight(packed, shape), shape, 2)


def pack_votes(votes_NK: Tensor, bits: int = 8) -> Tensor:
    """Convert int8 votes ``[N, K]`` to the layout of accumulators of so many bits."""
    require(bits in VOTE_BITS, f"bits must be one of {VOTE_BITS}, got {bits}")
    require(votes_NK.dim() == 2, f"votes must be [N, K], got {list(votes_NK.shape)}")
    if bits == 8:
        size = tuple(votes_NK.shape)
        votes = readable(votes_NK, "votes", torch.int8, size, votes_NK.device)
        return votes.clone(memory_format=torch.contiguous_format)
    return _stored(votes_NK, "votes", bits)


def unpack_votes(votes: Tensor, shape: WeightShape) -> Tensor:
    """Convert stored accumulators to int8 ``[N, K]`` in new memory."""
    stored = readable(votes, "votes", vote_dtype(shape), stored_size(shape), votes.device)
    if shape.vote_bits == 8:
        return stored.clone(memory_format=torch.contiguous_format)
    return _opened(stored, shape, shape.vote_bits)
