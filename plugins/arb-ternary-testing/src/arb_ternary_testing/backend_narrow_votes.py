"""Backend suite, part 5: accumulators of 4 and 2 bits under sign votes, for backends that declare
``narrow_votes``.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary_testing import restatement as expected
from arb_ternary_testing.backend_case import Array, BackendCase, examples

BITS: Final = (4, 2)


def _random(seed: int, shape: tuple[int, ...], largest: int) -> Array:
    return np.random.default_rng(seed).integers(-largest, largest + 1, shape).astype(np.int8)


class NarrowVoteTests(BackendCase):
    """Storage and sign votes of narrow accumulators."""

    @pytest.mark.parametrize("columns", [1, 2, 31, 128, 129, 300])
    @pytest.mark.parametrize("bits", BITS)
    def test_narrow_votes_survive_their_layout_in_as_many_bits(
        self, bits: int, columns: int
    ) -> None:
        weight = self.weight(1, 5, columns, 128, vote_bits=bits)
        largest = expected.VOTE_RANGES[bits][1]
        votes = _random(columns, (5, columns), largest)
        packed = self.votes_in(votes, bits)
        np.testing.assert_array_equal(self.votes_out(packed, weight.shape), votes)
        many = self.votes_in(np.full((64, 1024), largest, np.int8), bits)
        assert many.nbytes == 64 * 1024 * bits // 8

    @pytest.mark.parametrize("kind", ["float32", "int8"])
    @pytest.mark.parametrize("bits", BITS)
    def test_narrow_sign_votes_are_those_of_the_rule_and_saturate(
        self, bits: int, kind: str
    ) -> None:
        weight = self.weight(2, 17, 131, 32, vote_bits=bits)
        low, high = expected.VOTE_RANGES[bits]
        grad = _random(3, (4, 17), 3)
        x = _random(4, (4, 131), 3)
        votes = np.random.default_rng(5).choice([low, low + 1, 0, high], (17, 131)).astype(np.int8)
        exponent_votes = _random(6, (17, weight.shape.groups), 100)
        state = self.state(weight, votes, exponent_votes)
        scale = self.tensor(np.float32(1.0)) if kind == "int8" else None
        operands = self.tensor(grad.astype(kind)), self.tensor(x.astype(kind))
        self.run("cast_votes", *operands, scale, state)
        gradient = grad.astype(np.int64).T @ x.astype(np.int64)
        wanted = expected.cast_votes(gradient, weight.trits, votes, exponent_votes, 32, bits)
        np.testing.assert_array_equal(self.votes_out(state.votes, weight.shape), wanted[0])
        np.testing.assert_array_equal(self.array(state.learned), wanted[1])

    @pytest.mark.parametrize("bits", BITS)
    def test_narrow_votes_of_a_lookup_leave_other_rows_alone(self, bits: int) -> None:
        weight = self.weight(7, 6, 45, 32, vote_bits=bits)
        ids = np.array([4, 0, 4])
        grad = _random(8, (3, 45), 3)
        votes = _random(9, (6, 45), expected.VOTE_RANGES[bits][1])
        state = self.state(weight, votes)._replace(exponent_votes=None)
        before = state.votes.clone()
        self.run(
            "embedding_votes", self.tensor(ids), self.tensor(grad.astype(np.float32)), None, state
        )
        summed = np.zeros((6, 45), np.int64)
        np.add.at(summed, ids, grad)
        wanted, _ = expected.cast_votes(
            summed, weight.trits, votes, np.zeros((6, 2), np.int8), 32, bits
        )
        np.testing.assert_array_equal(self.votes_out(state.votes, weight.shape), wanted)
        untouched = torch.tensor([1, 2, 3, 5], device=self.device)
        rows = state.votes.view(6, -1), before.view(6, -1)
        assert torch.equal(rows[0][untouched], rows[1][untouched])

    @examples(20)
    @given(
        bits=st.sampled_from(BITS),
        columns=st.integers(1, 200),
        leak=st.integers(0, 2),
        data=st.data(),
    )
    def test_narrow_crossings_flip_trits_by_one_step(
        self, bits: int, columns: int, leak: int, data: st.DataObject
    ) -> None:
        largest = expected.VOTE_RANGES[bits][1]
        threshold = data.draw(st.integers(1, largest))
        seed = data.draw(st.integers(0, 2**16))
        weight = self.weight(seed, 5, columns, 64, vote_bits=bits)
        votes = _random(seed + 1, (5, columns), largest)
        state = self.state(weight, votes)
        flips = self.run("apply_votes", state, threshold, leak)
        trits, left, count = expected.apply_votes(weight.trits, votes, threshold, leak)
        np.testing.assert_array_equal(self.trits_out(weight.packed, weight.shape), trits)
        np.testing.assert_array_equal(self.votes_out(state.votes, weight.shape), left)
        assert int(flips) == count
        # Padding is packed as before: bytes are those of packing what came out.
        assert torch.equal(state.votes, self.votes_in(left, bits))
