"""Votes turned into flips: check arguments, launch kernels, count flips."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from arb_ternary.backends.arguments import check_groups, vote_dtype
from arb_ternary.backends.floors import renew_floors
from arb_ternary.backends.vote_state import VoteState
from arb_ternary.counters.hashing import USE_DECAY, hash_keys
from arb_ternary_tilelang.arguments import UNIT, packed_bytes, require, words, writable
from arb_ternary_tilelang.kernels import flips as programs
from arb_ternary_tilelang.lane import lane_of
from arb_ternary_tilelang.storage import held_votes, stored_size


def kernels() -> dict[str, Callable[..., object]]:
    """Return the kernels of this module by op."""
    return {
        "apply_votes": apply_votes,
        "apply_scaled_votes": apply_scaled_votes,
        "apply_exponent_votes": apply_exponent_votes,
    }


def _flip(
    state: VoteState,
    threshold: int,
    rate: int,
    *,
    scaled: bool,
    carry: bool = False,
    draw: tuple[int, int] = (0, 0),
) -> Tensor:
    shape = state.shape
    packed = state.weight
    check_groups(shape, UNIT)
    require(
        1 <= threshold <= shape.largest_vote,
        f"threshold must be in 1..{shape.largest_vote} for votes of {shape.vote_bits} bits, got "
        f"{threshold}",
    )
    device = packed.device
    rows = shape.out_features
    columns = shape.in_features
    lane = lane_of(device)
    held = writable(packed, "packed", torch.uint8, (rows, packed_bytes(columns)), device)
    dtype = vote_dtype(shape)
    stored = writable(state.votes, "votes", dtype, stored_size(shape), device)
    if not held.numel():
        return torch.zeros((), dtype=torch.int64, device=device)
    held_words = words(held)
    moved = torch.zeros(rows, dtype=torch.int32, device=device)
    kernel = lane.kernel(
        programs.flip_trits,
        shape.vote_bits,
        lane.option(scaled),
        lane.option(carry),
        N=rows,
        K=columns,
    )
    kernel(
        held_words,
        held_votes(stored, shape),
        moved,
        columns,
        threshold,
        rate,
        *draw,
        int(scaled),
        int(carry),
    )
    return moved.sum(dtype=torch.int64)


def apply_votes(state: VoteState, threshold: int, leak: int) -> Tensor:
    """Flip trits by sign votes, which then leak; mutates ``weight`` and ``votes``.

    Returns:
        The number of trits that changed, an int64 scalar.
    """
    require(leak >= 0, f"leak must not be negative, got {leak}")
    return _flip(state, threshold, min(leak, 128), scaled=False)


def apply_scaled_votes(state: VoteState, threshold: int, decay: int, carry: bool) -> Tensor:
    """Flip trits by scaled votes, which then decay; mutates ``weight`` and ``votes``.

    Returns:
        The number of trits that changed, an int64 scalar.
    """
    require(0 <= decay <= 65536, f"decay must be in 0..65536, got {decay}")
    seed, step, stream = state.draw()
    count = state.sizes[0] * state.sizes[1]
    key_0, key_1, _ = hash_keys(seed, step, stream + USE_DECAY, count)
    # Without decay nothing is drawn, as in a leak of 0.
    return _flip(state, threshold, decay, scaled=decay > 0, carry=bool(carry), draw=(key_0, key_1))


def apply_exponent_votes(state: VoteState, threshold: int, band: int, leak: int) -> Tensor:
    """Move exponents within their band; mutates ``exponent`` and ``exponent_votes``.

    Returns:
        The number of exponents that changed, an int64 scalar.
    """
    exponent = state.exponent
    exponent_votes = state.learned
    origin = state.origin
    require(1 <= threshold <= 127, f"threshold must be in 1..127, got {threshold}")
    require(band >= 0 and leak >= 0, f"band and leak must not be negative, got {band} and {leak}")
    device = exponent.device
    size = tuple(exponent.shape)
    held = writable(exponent, "exponent", torch.int8, size, device)
    votes = writable(exponent_votes, "exponent_votes", torch.int8, size, device)
    centre = origin.detach().expand(size).contiguous()
    moved = torch.empty(held.numel(), dtype=torch.int8, device=device)
    if moved.numel():
        kernel = lane_of(device).kernel(programs.flip_exponents)
        kernel(
            held.view(-1),
            votes.view(-1),
            centre.view(-1),
            moved,
            threshold,
            min(band, 256),
            min(leak, 128),
        )
        renew_floors(exponent)
    return moved.sum(dtype=torch.int64)
