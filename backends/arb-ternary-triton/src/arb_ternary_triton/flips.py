"""Applying votes: crossings of accumulators become flips of trits and steps of exponents."""

from __future__ import annotations

import torch
from torch import Tensor

from arb_ternary.backends.vote_state import VoteState
from arb_ternary.counters.hashing import USE_DECAY
from arb_ternary_triton.arguments import check_mutable, check_readable, check_shape, packed_columns
from arb_ternary_triton.floors import renew_floors
from arb_ternary_triton.kernels.flips import flip_exponents_kernel, flip_kernel
from arb_ternary_triton.launch import INTERPRETED, cdiv, launch, power_of_two_up
from arb_ternary_triton.layout import vote_size
from arb_ternary_triton.noise import hash_keys
from arb_ternary_triton.tiles import elementwise


def _flip(
    state: VoteState,
    threshold: int,
    *,
    leak: int = 0,
    decay: int = 0,
    carry: bool = False,
    keys: tuple[int, int, bool] = (0, 0, False),
) -> Tensor:
    shape = state.shape
    packed = state.weight
    votes = state.votes
    check_shape(shape)
    rows = shape.out_features
    columns = shape.in_features
    check_mutable(packed, "packed", torch.uint8, (rows, packed_columns(columns)))
    check_mutable(
        votes, "votes", torch.int8 if shape.vote_bits == 8 else torch.uint8, vote_size(shape)
    )
    flips = torch.zeros((), dtype=torch.int64, device=packed.device)
    tile = elementwise(rows, columns)
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
        *keys[:2],
        state.first_row,
        CARRY=carry,
        LEAK=leak > 0,
        DECAY=decay > 0,
        BITS=shape.vote_bits,
        WIDE=keys[2],
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        warps=tile.warps,
    )
    return flips


def apply_votes(state: VoteState, threshold: int, leak: int) -> Tensor:
    """Turn crossings into flips; mutates ``weight`` and ``votes``; int64 scalar: trits that
    changed.
    """
    return _flip(state, threshold, leak=leak)


def apply_scaled_votes(state: VoteState, threshold: int, decay: int, carry: bool) -> Tensor:
    """Flips with or without carry, then decay by the counter hash; mutates ``weight`` and
    ``votes``.
    """
    keys = (0, 0, False)
    if decay:
        seed, step, stream = state.draw()
        keys = hash_keys(
            seed, step, stream + USE_DECAY, (state.first_row + state.sizes[0]) * state.sizes[1]
        )
    return _flip(state, threshold, decay=decay, carry=carry, keys=keys)


def apply_exponent_votes(state: VoteState, threshold: int, band: int, leak: int) -> Tensor:
    """Move exponents by one step within their band; mutates both; int64 scalar: exponents that
    changed.
    """
    exponent = state.exponent
    exponent_votes = state.learned
    origin = state.origin
    rows, groups = exponent.shape
    check_mutable(exponent, "exponent", torch.int8, (rows, groups))
    check_mutable(exponent_votes, "exponent_votes", torch.int8, (rows, groups))
    centre = check_readable(origin, "origin", torch.int8, tuple(origin.shape)).expand(rows, groups)
    moves = torch.zeros((), dtype=torch.int64, device=exponent.device)
    count = rows * groups
    chunk = min(power_of_two_up(count), 1 << 16) if INTERPRETED else 512
    launch(
        flip_exponents_kernel,
        (cdiv(count, chunk),),
        exponent,
        exponent_votes,
        centre,
        moves,
        count,
        groups,
        *centre.stride(),
        threshold,
        band,
        leak,
        CHUNK=chunk,
    )
    renew_floors(exponent)
    return moves
