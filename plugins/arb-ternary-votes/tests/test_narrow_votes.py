"""Sign votes in accumulators of 4 and 2 bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from arb_ternary import TernaryLinear
from arb_ternary.errors import ConfigError
from arb_ternary_votes.sign_votes import SignVotes


@pytest.mark.parametrize("bits", [4, 2])
def test_narrow_sign_votes_follow_a_numpy_restatement(bits: int) -> None:
    layer = TernaryLinear(
        16, 8, group_size=32, activations="float", scale_rule="frozen", vote_bits=bits
    )
    optimizer = SignVotes({"layer": layer}, lr=0.25)
    largest = layer.shape.largest_vote
    rng = np.random.default_rng(0)
    trits = layer.trits().numpy().astype(np.int64)
    votes = np.zeros((8, 16), np.int64)
    for _ in range(30):
        x = rng.integers(-3, 4, (5, 16)).astype(np.float32)
        g = rng.integers(-3, 4, (5, 8)).astype(np.float32)
        layer(torch.from_numpy(x)).backward(torch.from_numpy(g))
        outcome = optimizer.step()
        votes = np.clip(votes - np.sign(g.T @ x).astype(np.int64), -largest, largest)
        # A quarter of the rate asks for four times the threshold, which is more than the
        # accumulator holds.
        f = (votes >= largest).astype(int) - (votes <= -largest).astype(int)
        after = np.clip(trits + f, -1, 1)
        assert outcome.flips == int((after != trits).sum())
        trits = after
        votes = np.where(f != 0, 0, votes)
        assert np.array_equal(layer.trits().numpy(), trits)
        assert np.array_equal(layer.logical_votes().numpy(), votes)


def test_threshold_beyond_the_accumulators_is_refused() -> None:
    layer = TernaryLinear(8, 4, vote_bits=4)
    assert SignVotes({"layer": layer}, accum_threshold=7).param_groups[0]["accum_threshold"] == 7
    with pytest.raises(
        ConfigError,
        match="accum_threshold: 8 is out of reach for the accumulators of layer, 4 bits",
    ):
        SignVotes({"layer": layer}, accum_threshold=8)
