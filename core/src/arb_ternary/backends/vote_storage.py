"""Where the torch backend keeps accumulators of 8, 4 and 2 bits.

8 bits: int8 ``[N, K]``. 4 bits: uint8 ``[N, ceil(K / 2)]``, a byte holds columns ``2 i`` and ``2 i + 1`` as codes
``a + 8`` in its low and its high half; padding holds ``a = 0``. 2 bits: as trits (:mod:`arb_ternary.backends.layout`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from arb_ternary.backends.layout import pack_trits, packed_columns, unpack_trits
from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.vote_state import VoteState

__all__ = ["opened", "pack_votes", "row_bytes", "unpack_votes"]


def _pack_nibbles(votes_NK: Tensor) -> Tensor:
    rows, columns = votes_NK.shape
    width = -(-columns // 2)
    codes = torch.full((rows, 2 * width), 8, dtype=torch.uint8, device=votes_NK.device)
    codes[:, :columns] = votes_NK + 8
    pairs = codes.view(rows, width, 2)
    return pairs[:, :, 0] | (pairs[:, :, 1] << 4)


def _unpack_nibbles(votes: Tensor, columns: int) -> Tensor:
    rows, width = votes.shape
    codes = torch.empty(rows, width, 2, dtype=torch.int8, device=votes.device)
    codes[:, :, 0] = votes & 15
    codes[:, :, 1] = votes >> 4
    wide = codes.sub_(8).view(rows, 2 * width)
    return wide if 2 * width == columns else wide[:, :columns].contiguous()


def pack_votes(votes_NK: Tensor, bits: int = 8) -> Tensor:
    """int8 votes ``[N, K]`` to the backend's layout; with 8 bits they are the same.

    Args:
        votes_NK: int8, within -7..7 for 4 bits and -1..1 for 2.
        bits: of an accumulator. Only a backend with the capability ``narrow_votes`` is given this argument, and only
            when it is not 8.
    """
    if bits == 4:
        return _pack_nibbles(votes_NK)
    return pack_trits(votes_NK) if bits == 2 else votes_NK.clone(memory_format=torch.contiguous_format)


def unpack_votes(votes: Tensor, shape: WeightShape) -> Tensor:
    """The backend's layout of votes to int8 ``[N, K]``, memory of its own."""
    stored = votes.view(shape.out_features, row_bytes(shape.in_features, shape.vote_bits))
    return stored.clone() if shape.vote_bits == 8 else _open(stored, shape)


def row_bytes(columns: int, bits: int) -> int:
    """Bytes of a row of ``columns`` stored accumulators of ``bits`` bits."""
    return {8: columns, 4: -(-columns // 2), 2: packed_columns(columns)}[bits]


def _open(stored: Tensor, shape: WeightShape) -> Tensor:
    """Some stored rows as int8 ``[n, K]``: with 8 bits these rows themselves, else a copy."""
    if shape.vote_bits == 4:
        return _unpack_nibbles(stored, shape.in_features)
    return unpack_trits(stored, shape.in_features) if shape.vote_bits == 2 else stored


@contextmanager
def opened(state: VoteState, rows: slice | Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Some rows of a state: packed weight, votes as int8 ``[n, K]``, votes of exponents.

    Both kinds of votes are to be changed in place, and are stored when the context is left. Rows are a slice, or int64
    and distinct.
    """
    shape = state.shape
    stored = state.votes.view(shape.out_features, row_bytes(shape.in_features, shape.vote_bits))
    some, learned = stored[rows], state.exponent_votes
    exponents = None if learned is None else learned[rows]
    votes = _open(some, shape)
    yield state.weight[rows], votes, exponents
    if shape.vote_bits != 8:
        some.copy_(pack_votes(votes, shape.vote_bits))
    if isinstance(rows, Tensor):
        stored[rows] = some
        if learned is not None and exponents is not None:
            learned[rows] = exponents
