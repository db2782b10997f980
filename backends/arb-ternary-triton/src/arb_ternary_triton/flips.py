"""Apply votes: crossings of accumulators become flips of trits and steps of exponents."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.vote_state import VoteState
from arb_ternary.counters.hashing import USE_DECAY
from arb_ternary_triton.arguments import check_mutable, check_readable, check_shape, packed_columns
from arb_ternary_triton.floors import renew_floors
from arb_ternary_triton.kernels.flips import flip_exponents_kernel, flip_kernel
from arb_ternary_triton.launch import INTERPRETED, cdiv, instruction_set, launch, power_of_two_up
from arb_ternary_triton.layout import vote_dtype, vote_size
from arb_ternary_triton.noise import HashKeys, hash_keys
from arb_ternary_triton.tiles import elementwise

_NO_KEYS: Final = HashKeys()


def _flip(
    state: VoteState,
    threshold: int,
    *,
    leak: int = 0,
    decay: int = 0,
    carry: bool = False,
    keys: HashKeys = _NO_KEYS,
) -> Tensor:
    shape = state.shape
    packed = state.weight
    votes = state.votes
    check_shape(shape)
    rows = shape.out_features
    columns = shape.in_features
    check_mutable(packed, "packed", torch.uint8, (rows, packed_columns(columns)))
    check_mutable(votes, "votes", vote_dtype(shape), vote_size(shape))
    flips = torch.zeros((), dtype=torch.int64, device=packed.device)
    in_words = shape.vote_bits == 8 and columns % 4 == 0 and votes.data_ptr() % 4 == 0
    tile = elementwise(rows, columns, warps=1 if in_words else 4)
    launch(
        flip_kernel,
        (cdiv(rows, tile.rows), cdiv(columns, tile.columns)),
        packed,
        votes,
        flips,
        rows,
        columns,
        packed.shape[1],
        votes.shape[1],
        threshold,
        leak,
        decay,
        keys.first,
        keys.second,
        state.first_row,
        CARRY=carry,
        LEAK=leak > 0,
        DECAY=decay > 0,
        BITS=shape.vote_bits,
        WORDS=in_words,
        WIDE=keys.wide,
        # The instructions that are used take factors below 2**16.
        ISA=instruction_set(packed.device) if decay < 1 << 16 else 0,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        warps=tile.warps,
    )
    return flips


def apply_votes(state: VoteState, threshold: int, leak: int) -> Tensor:
    """Turn crossings into flips and return the number of changed trits, int64.

    Mutates ``weight`` and ``votes``.
    """
    return _flip(state, threshold, leak=leak)


def apply_scaled_votes(state: VoteState, threshold: int, decay: int, carry: bool) -> Tensor:
    """Flip trits with or without carry, then decay the votes by the counter hash.

    Mutates ``weight`` and ``votes``. Returns the number of changed trits, int64.
    """
    keys = _NO_KEYS
    if decay:
        seed, step, stream = state.draw()
        shape = state.shape
        count = (state.first_row + shape.out_features) * shape.in_features
        keys = hash_keys(seed, step, stream + USE_DECAY, count)
    return _flip(state, threshold, decay=decay, carry=carry, keys=keys)


def apply_exponent_votes(state: VoteState, threshold: int, band: int, leak: int) -> Tensor:
    """Move exponents by one step within their band and return the number that changed, int64.

    Mutates the exponents and their votes.
    """
    exponent = state.exponent
    exponent_votes = state.learned
    rows, groups = exponent.shape
    check_mutable(exponent, "exponent", torch.int8, (rows, groups))
    check_mutable(exponent_votes, "exponent_votes", torch.int8, (rows, groups))
    origin = check_readable(state.origin, "origin", torch.int8, tuple(state.origin.shape))
    row_stride, column_stride = origin.expand(rows, groups).stride()
    moves = torch.zeros((), dtype=torch.int64, device=exponent.device)
    count = rows * groups
    chunk = min(power_of_two_up(count), 1 << 16) if INTERPRETED else 512
    launch(
        flip_exponents_kernel,
        (cdiv(count, chunk),),
        exponent,
        exponent_votes,
        origin,
        moves,
        count,
        groups,
        row_stride,
        column_stride,
        threshold,
        band,
        leak,
        CHUNK=chunk,
    )
    renew_floors(exponent)
    return moves
