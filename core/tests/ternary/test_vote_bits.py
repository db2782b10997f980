"""Modules with accumulators of 4 and 2 bits: their state, its two forms, and sign votes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from arb_ternary import (
    TernaryEmbedding,
    TernaryLinear,
    TernaryRMSNorm,
)
from arb_ternary.errors import CheckpointError
from arb_ternary.ternary.encoding import encode_at_rest
from arb_ternary.ternary.module import TernaryModule


def with_votes(bits: int, rows: int = 6, columns: int = 45) -> TernaryLinear:
    layer = TernaryLinear(columns, rows, group_size=32, vote_bits=bits)
    largest = layer.shape.largest_vote
    layer.set_trits(
        layer.trits(), votes=torch.randint(-largest, largest + 1, (rows, columns), dtype=torch.int8)
    )
    return layer


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_state_dict_holds_logical_votes_and_restores_them(bits: int) -> None:
    source = with_votes(bits)
    state = source.state_dict()
    logical = source.logical_votes()
    assert torch.equal(state["votes"], encode_at_rest(logical) if bits == 2 else logical)
    target = TernaryLinear(45, 6, group_size=32, vote_bits=bits)
    target.load_state_dict(state)
    assert torch.equal(target.votes, source.votes)
    assert torch.equal(copy.deepcopy(target).logical_votes(), logical)


def test_votes_of_other_bits_are_refused_by_name() -> None:
    wide, narrow, narrowest = (nn.Sequential(with_votes(bits)) for bits in (8, 4, 2))
    wide[0].votes.fill_(100)
    with pytest.raises(CheckpointError, match=r"0\.votes: votes of 4 bits lie in -7\.\.7"):
        narrow.load_state_dict(wide.state_dict())
    with pytest.raises(CheckpointError, match=r"0\.votes: 45 trits per row"):
        narrowest.load_state_dict(narrow.state_dict())
    with pytest.raises(
        CheckpointError,
        match=r"0\.votes: accumulators of 8 bits are int8 at rest, got torch\.uint8",
    ):
        wide.load_state_dict(narrowest.state_dict())


def test_votes_beyond_their_bits_are_refused_and_change_nothing() -> None:
    layer = with_votes(4)
    before = layer.votes.clone()
    with pytest.raises(ValueError, match=r"votes of 4 bits lie in -7\.\.7"):
        layer.set_trits(layer.trits(), votes=torch.full((6, 45), 8, dtype=torch.int8))
    assert torch.equal(layer.votes, before)
    with pytest.raises(ValueError, match="vote_bits must be one of"):
        TernaryLinear(4, 4, vote_bits=5)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_every_module_takes_the_bits_and_a_threshold_within_them(bits: int) -> None:
    modules: list[TernaryModule] = [
        TernaryLinear(8, 4, vote_bits=bits),
        TernaryEmbedding(4, 8, vote_bits=bits),
        TernaryRMSNorm(8, vote_bits=bits),
    ]
    for module in modules:
        assert module.shape.vote_bits == bits
        assert module.accum_threshold == {8: 32, 4: 7, 2: 1}[bits]
        assert not module.logical_votes().any()
        assert ("vote_bits" in module.extra_repr()) == (bits != 8)


@pytest.mark.parametrize("bits", [4, 2])
def test_narrow_sign_votes_follow_a_numpy_restatement(bits: int) -> None:
    layer = TernaryLinear(
        16, 8, group_size=32, activations="float", scale_rule="frozen", vote_bits=bits
    )
    largest = layer.shape.largest_vote
    rng = np.random.default_rng(0)
    trits = layer.trits().numpy().astype(np.int64)
    votes = np.zeros((8, 16), np.int64)
    for _ in range(30):
        x = rng.integers(-3, 4, (5, 16)).astype(np.float32)
        g = rng.integers(-3, 4, (5, 8)).astype(np.float32)
        layer(torch.from_numpy(x)).backward(torch.from_numpy(g))
        flips = layer.apply_votes("apply_votes", largest, 0)
        votes = np.clip(votes - np.sign(g.T @ x).astype(np.int64), -largest, largest)
        f = (votes >= largest).astype(int) - (votes <= -largest).astype(int)
        after = np.clip(trits + f, -1, 1)
        assert int(flips) == int((after != trits).sum())
        trits = after
        votes = np.where(f != 0, 0, votes)
        assert np.array_equal(layer.trits().numpy(), trits)
        assert np.array_equal(layer.logical_votes().numpy(), votes)


def test_a_bias_keeps_votes_of_eight_bits_and_their_threshold() -> None:
    layer = TernaryLinear(8, 3, bias=True, vote_bits=2)
    assert layer.bias is not None
    assert layer.bias_votes is not None
    layer.bias_votes.copy_(torch.tensor([5, -5, 4]))
    layer.apply_bias_votes(5)
    assert layer.bias.tolist() == [1, -1, 0]
    assert layer.bias_votes.tolist() == [0, 0, 4]
    TernaryLinear(8, 3).apply_bias_votes(5)
