"""Scaled votes and the storage of accumulators in the torch backend, beyond the backend suite."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from arb_ternary.backends import reference, reference_votes
from arb_ternary.backends import reference_scaled_votes as sv
from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.vote_state import VoteLimits, VoteState, new_state


def cast(shape: WeightShape, vote_scale: torch.Tensor, integer: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    kind = torch.int8 if integer else torch.float32
    g = torch.randint(-127, 128, (9, shape.out_features), generator=generator).to(kind)
    x = torch.randint(-127, 128, (9, shape.in_features), generator=generator).to(kind)
    packed = reference.pack(
        torch.randint(-1, 2, (shape.out_features, shape.in_features), generator=generator).char()
    )
    votes = reference.pack_votes(
        torch.zeros(shape.out_features, shape.in_features, dtype=torch.int8), shape.vote_bits
    )
    exponent = torch.zeros(shape.out_features, shape.groups, dtype=torch.int8)
    state = scaled(
        new_state(shape, packed, exponent, votes, "torch"), vote_scale, VoteLimits(700, 1)
    )
    sv.cast_scaled_votes(g, x, torch.tensor(0.25) if integer else None, state)
    flips = sv.apply_scaled_votes(state, 1, 5000, True)
    return [votes, state.learned, state.scaling[0], packed, flips]


def scaled(state: VoteState, vote_scale: torch.Tensor, limits: VoteLimits) -> VoteState:
    return state._replace(
        control=torch.tensor([1, 0, 1, 2]),
        limits=torch.tensor(limits),
        magnitudes=torch.zeros(vote_scale.shape),
        vote_scale=vote_scale,
    )


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("integer", [False, True])
def test_tiles_do_not_change_scaled_votes(
    monkeypatch: pytest.MonkeyPatch, integer: bool, bits: int
) -> None:
    shape = WeightShape(10, 41, 32, bits)
    vote_scale = torch.full((51,), 4, dtype=torch.int32) if integer else torch.full((51,), 0.01)
    whole = cast(shape, vote_scale, integer)
    assert int(whole[-1]) > 0
    monkeypatch.setattr(reference_votes, "_TILE", 130)
    monkeypatch.setattr(sv, "_SHIFTED", 50)
    for one, other in zip(whole, cast(shape, vote_scale, integer), strict=True):
        # Whole numbers below 2**24: the float sums are exact in any order.
        assert torch.equal(one, other)


def test_shifts_without_an_int8_gradient_are_refused() -> None:
    shape = WeightShape(4, 6, 32)
    with pytest.raises(ValueError, match="int8 gradient"):
        cast(shape, torch.zeros(10, dtype=torch.int32), integer=False)


def test_an_infinite_gradient_casts_full_votes_and_nan_none() -> None:
    votes = torch.zeros(1, 3, dtype=torch.int8)
    exponent = torch.zeros(1, 1, dtype=torch.int8)
    grad = torch.tensor([[1.0]])
    x = torch.tensor([[torch.inf, torch.nan, -torch.inf]])
    state = new_state(WeightShape(1, 3, 32), reference.pack(votes), exponent, votes, "torch")
    state = scaled(state, torch.ones(4), VoteLimits(1024))._replace(exponent_votes=None)
    sv.cast_scaled_votes(grad, x, None, state)
    assert votes.tolist() == [[-4, 0, 4]]
    assert float(state.stats[0]) == 1.0


def test_four_bit_votes_keep_the_even_column_in_the_low_half() -> None:
    votes = np.array([[-7, 7, 0], [1, -1, 3]], np.int8)
    packed = reference.pack_votes(torch.from_numpy(votes), 4)
    assert packed.tolist() == [[0x1 | 0xF << 4, 0x8 | 0x8 << 4], [0x9 | 0x7 << 4, 0xB | 0x8 << 4]]
    assert reference.unpack_votes(packed, WeightShape(2, 3, 32, 4)).tolist() == votes.tolist()


def test_two_bit_votes_are_stored_as_trits() -> None:
    votes = torch.randint(-1, 2, (5, 200), dtype=torch.int8)
    assert torch.equal(reference.pack_votes(votes, 2), reference.pack(votes))


def test_unpacked_votes_are_memory_of_their_own() -> None:
    for bits in (8, 4, 2):
        packed = reference.pack_votes(torch.zeros(2, 8, dtype=torch.int8), bits)
        before = packed.clone()
        reference.unpack_votes(packed, WeightShape(2, 8, 32, bits)).fill_(1)
        assert torch.equal(packed, before)


def test_vote_bits_outside_the_format_are_refused() -> None:
    with pytest.raises(ValueError, match="vote_bits"):
        WeightShape(2, 8, 32, 3)
