"""The layout of the torch backend: trits in two bits, accumulators in 8, 4 or 2 bits.

Trits have the byte order of GGUF TQ2_0 without its padding: along K, blocks of 128 weights take 32
bytes; byte ``j`` of a block holds weights ``j``, ``j + 32``, ``j + 64`` and ``j + 96`` in bits 0-1,
2-3, 4-5 and 6-7 as codes ``t + 1``. The ``R < 128`` weights that remain take ``c = ceil(R / 4)``
bytes in the same way: ``j``, ``j + c``, ``j + 2 c``, ``j + 3 c``. Weights beyond the end of the row
are ``t = 0``.

Accumulators of 8 bits are int8 ``[N, K]``. 4 bits: uint8 ``[N, ceil(K / 2)]``, a byte holds columns
``2 i`` and ``2 i + 1`` as codes ``a + 8`` in its low and its high half; padding holds ``a = 0``. 2
bits: as trits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.vote_state import VoteState

BLOCK: Final = 128
PLANES: Final = 4


def packed_columns(columns: int) -> int:
    """Return the bytes of a packed row of ``columns`` trits: ``ceil(K / 4)``."""
    return -(-columns // PLANES)


def pack_trits(trits_NK: Tensor) -> Tensor:
    """Pack int8 trits ``[N, K]`` into uint8 ``[N, ceil(K / 4)]``."""
    rows, columns = trits_NK.shape
    padded = packed_columns(columns) * PLANES
    codes = torch.ones(rows, padded, dtype=torch.uint8, device=trits_NK.device)
    codes[:, :columns] = trits_NK + 1
    whole = columns // BLOCK * BLOCK
    body = _pack_blocks(codes[:, :whole], BLOCK)
    if whole == columns:
        return body
    rest = padded - whole
    tail = _pack_blocks(codes[:, whole:], rest)
    return torch.cat([body, tail], dim=1)


def unpack_trits(packed: Tensor, columns: int) -> Tensor:
    """Unpack uint8 ``[N, ceil(K / 4)]`` to int8 trits ``[N, K]``."""
    rows, width = packed.shape
    whole = columns // BLOCK * BLOCK
    if whole == columns:
        return _unpack_blocks(packed, BLOCK)
    trits = torch.empty(rows, columns, dtype=torch.int8, device=packed.device)
    body = whole // PLANES
    trits[:, :whole] = _unpack_blocks(packed[:, :body], BLOCK)
    rest = PLANES * (width - body)
    tail = _unpack_blocks(packed[:, body:], rest)
    trits[:, whole:] = tail[:, : columns - whole]
    return trits


def spread_over_columns(values_NJ: Tensor, shape: WeightShape) -> Tensor:
    """Repeat the value of each group over its columns: ``[N, J]`` to ``[N, K]``."""
    if shape.groups == 1:
        return values_NJ.expand(-1, shape.in_features)
    return values_NJ.repeat_interleave(shape.group_size, dim=1)[:, : shape.in_features]


def power_of_two(exponent: Tensor) -> Tensor:
    """Exact float32 ``2**exponent`` for integer exponents in -126..127, built from its bits."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def _pack_blocks(codes: Tensor, block: int) -> Tensor:
    """Pack codes in blocks of this many weights."""
    rows, columns = codes.shape
    planes = codes.reshape(rows, columns // block, PLANES, block // PLANES)
    first, second, third, fourth = planes.unbind(dim=2)
    packed = first | (second << 2) | (third << 4) | (fourth << 6)
    return packed.reshape(rows, columns // PLANES)


def _unpack_blocks(packed: Tensor, block: int) -> Tensor:
    """Unpack trits from blocks of this many weights."""
    rows, width = packed.shape
    lanes = block // PLANES
    blocks = packed.reshape(rows, width // lanes, 1, lanes)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device)
    codes = (blocks >> shifts.view(1, 1, PLANES, 1)) & 3
    return codes.view(torch.int8).sub_(1).view(rows, width * PLANES)


def _pack_nibbles(votes_NK: Tensor) -> Tensor:
    """Pack votes of 4 bits, two per byte."""
    rows, columns = votes_NK.shape
    width = -(-columns // 2)
    codes = torch.full((rows, 2 * width), 8, dtype=torch.uint8, device=votes_NK.device)
    codes[:, :columns] = votes_NK + 8
    low, high = codes.view(rows, width, 2).unbind(dim=2)
    return low | (high << 4)


def _unpack_nibbles(votes: Tensor, columns: int) -> Tensor:
    """Unpack votes of 4 bits."""
    rows, width = votes.shape
    codes = torch.empty(rows, width, 2, dtype=torch.int8, device=votes.device)
    codes[:, :, 0] = votes & 15
    codes[:, :, 1] = votes >> 4
    wide = codes.sub_(8).view(rows, 2 * width)
    if 2 * width == columns:
        return wide
    return wide[:, :columns].contiguous()


def pack_votes(votes_NK: Tensor, bits: int = 8) -> Tensor:
    """Pack int8 votes ``[N, K]``, within -7..7 for 4 bits and -1..1 for 2; copy those of 8 bits.

    Only a backend with the capability ``narrow_votes`` is given ``bits``, and only if they are not
    8.
    """
    if bits == 4:
        return _pack_nibbles(votes_NK)
    if bits == 2:
        return pack_trits(votes_NK)
    return votes_NK.clone(memory_format=torch.contiguous_format)


def unpack_votes(votes: Tensor, shape: WeightShape) -> Tensor:
    """Unpack votes to int8 ``[N, K]`` in new memory."""
    stored = _stored_rows(votes, shape)
    if shape.vote_bits == 8:
        return stored.clone()
    return _open(stored, shape)


def _stored_rows(votes: Tensor, shape: WeightShape) -> Tensor:
    """Return votes as a matrix with a row per row of the weight."""
    row_bits = shape.in_features * shape.vote_bits
    row_bytes = -(-row_bits // 8)
    return votes.view(shape.out_features, row_bytes)


def _open(stored: Tensor, shape: WeightShape) -> Tensor:
    """Return some stored rows as int8 ``[n, K]``: the rows themselves if of 8 bits, else a copy."""
    if shape.vote_bits == 4:
        return _unpack_nibbles(stored, shape.in_features)
    if shape.vote_bits == 2:
        return unpack_trits(stored, shape.in_features)
    return stored


@contextmanager
def opened(
    state: VoteState, rows: slice | Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Open some rows of a state: packed weight, votes as int8 ``[n, K]``, votes for exponents.

    Change both kinds of votes in place; they are stored when the context ends. Rows are a slice, or
    an int64 tensor of distinct indices.
    """
    shape = state.shape
    stored = _stored_rows(state.votes, shape)
    some = stored[rows]
    votes = _open(some, shape)
    learned = state.exponent_votes
    exponents = None if learned is None else learned[rows]

    yield state.weight[rows], votes, exponents

    if shape.vote_bits != 8:
        some.copy_(pack_votes(votes, shape.vote_bits))
    # A slice is a view of the state; an index by a tensor has copied the rows.
    if isinstance(rows, Tensor):
        stored[rows] = some
        if learned is not None and exponents is not None:
            learned[rows] = exponents
