"""Backend suite, part 5: accumulators of 4 and 2 bits under sign votes.

For backends that declare ``narrow_votes``.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from arb_ternary_testing import restatement as expected
from arb_ternary_testing.backend_case import (
    BackendCase,
    examples,
    filled,
    random_int8,
    sum_by_row,
)
from arb_ternary_testing.restatement import float32, int8, wide

BITS: Final = (4, 2)

every_size_of_vote = pytest.mark.parametrize("bits", BITS)


class NarrowVoteTests(BackendCase):
    """Tests of the storage and the sign votes of narrow accumulators."""

    @pytest.mark.parametrize("columns", [1, 2, 31, 128, 129, 300])
    @every_size_of_vote
    def test_layout_of_narrow_votes_is_lossless_and_compact(self, bits: int, columns: int) -> None:
        weight = self.weight(1, 5, columns, 128, vote_bits=bits)
        largest = expected.VOTE_RANGES[bits][1]
        votes = random_int8(columns, 5, columns, largest)
        packed = self.votes_in(votes, bits)
        assert_array_equal(self.votes_out(packed, weight.shape), votes)

        many = filled(largest, 64, 1024)
        packed = self.votes_in(many, bits)
        assert packed.nbytes == 64 * 1024 * bits // 8

    @pytest.mark.parametrize("kind", ["float32", "int8"])
    @every_size_of_vote
    def test_narrow_sign_votes_follow_the_rule_and_saturate(self, bits: int, kind: str) -> None:
        weight = self.weight(2, 17, 131, 32, vote_bits=bits)
        low, high = expected.VOTE_RANGES[bits]
        grad = random_int8(3, 4, 17, 3)
        x = random_int8(4, 4, 131, 3)
        rng = np.random.default_rng(5)
        votes = int8(rng.choice([low, low + 1, 0, high], (17, 131)))
        exponent_votes = random_int8(6, 17, weight.shape.groups, 100)
        state = self.state(weight, votes, exponent_votes)
        scale = self.scalar(1.0) if kind == "int8" else None

        self.run(
            "cast_votes",
            self.tensor(grad.astype(kind)),
            self.tensor(x.astype(kind)),
            scale,
            state,
        )

        gradient = wide(grad.T) @ wide(x)
        wanted_votes, wanted_exponent_votes = expected.cast_votes(
            gradient,
            weight.trits,
            votes,
            exponent_votes,
            32,
            bits,
        )
        self.assert_votes(state, wanted_votes)
        self.assert_equal(state.learned, wanted_exponent_votes)

    @every_size_of_vote
    def test_narrow_votes_of_a_lookup_leave_other_rows_alone(self, bits: int) -> None:
        weight = self.weight(7, 6, 45, 32, vote_bits=bits)
        ids = np.array([4, 0, 4])
        grad = random_int8(8, 3, 45, 3)
        votes = random_int8(9, 6, 45, expected.VOTE_RANGES[bits][1])
        state = self.state(weight, votes)._replace(exponent_votes=None)
        before = state.votes.clone()

        self.run(
            "embedding_votes",
            self.tensor(ids),
            self.tensor(float32(grad)),
            None,
            state,
        )

        no_exponent_votes = filled(0, 6, 2)
        wanted, _ = expected.cast_votes(
            sum_by_row(ids, grad, 6),
            weight.trits,
            votes,
            no_exponent_votes,
            32,
            bits,
        )
        self.assert_votes(state, wanted)
        untouched = torch.tensor([1, 2, 3, 5], device=self.device)
        after = state.votes.view(6, -1)
        assert torch.equal(after[untouched], before.view(6, -1)[untouched])

    @examples(20)
    @given(
        bits=st.sampled_from(BITS),
        columns=st.integers(1, 200),
        leak=st.integers(0, 2),
        data=st.data(),
    )
    def test_narrow_crossings_flip_trits_by_one_step(
        self,
        bits: int,
        columns: int,
        leak: int,
        data: st.DataObject,
    ) -> None:
        largest = expected.VOTE_RANGES[bits][1]
        threshold = data.draw(st.integers(1, largest))
        seed = data.draw(st.integers(0, 2**16))
        weight = self.weight(seed, 5, columns, 64, vote_bits=bits)
        votes = random_int8(seed + 1, 5, columns, largest)
        state = self.state(weight, votes)

        flips = self.run("apply_votes", state, threshold, leak)

        trits, left, count = expected.apply_votes(weight.trits, votes, threshold, leak)
        self.assert_trits(weight, trits)
        self.assert_votes(state, left)
        assert int(flips) == count
        # The padding is that of packing the same votes.
        assert torch.equal(state.votes, self.votes_in(left, bits))
