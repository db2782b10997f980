"""Backend suite, part 4: votes scaled by row and column, and the flips that they lead to."""

from __future__ import annotations

from itertools import product
from typing import Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from arb_ternary.backends.protocol import NARROW_NOISE
from arb_ternary.backends.vote_state import VoteLimits, VoteState
from arb_ternary_testing import restatement_votes as expected
from arb_ternary_testing.backend_case import (
    MANY_WEIGHTS,
    SHAPES,
    BackendCase,
    Cast,
    Sizes,
    Weight,
    examples,
    filled,
    gradient_with_nan,
    integers,
    ones,
    random_int8,
    small_floats,
    squares_by_row_and_column,
    sum_by_row,
)
from arb_ternary_testing.restatement import Array, float32, wide

#: The words of the counter hash in most tests. A stream is a multiple of the number of uses.
DRAW: Final = expected.Draw(seed=2**40 + 5, step=(3 << 20) + 1, stream=8 * 0xCBF43926)
#: The limits in most tests.
LIMITS: Final = VoteLimits(vote_limit=1024, exponent_shift=2)
BITS: Final = (8, 4, 2)
#: Every shape with accumulators of 8 bits, and one shape with narrow ones.
_SIZES_AND_BITS: Final = [
    *((sizes, 8) for sizes in SHAPES),
    (SHAPES[-2], 4),
    (SHAPES[-2], 2),
]

#: The votes and the exponent votes of a weight.
_Votes = tuple[Array, Array]

every_size_of_vote = pytest.mark.parametrize("bits", BITS)


def _factors(seed: int, size: int) -> Array:
    """Return positive factors of several orders of magnitude, none of them a power of two."""
    rng = np.random.default_rng(seed)
    logarithms = rng.uniform(-3, 1, size)
    return float32(np.exp(logarithms))


def _votes_of(weight: Weight) -> _Votes:
    """Return random votes and exponent votes for a weight."""
    shape = weight.shape
    votes = random_int8(
        seed=3,
        rows=shape.out_features,
        columns=shape.in_features,
        largest=shape.largest_vote,
    )
    exponent_votes = random_int8(4, shape.out_features, shape.groups)
    return votes, exponent_votes


def _sizes_by_row_and_column(values: Array) -> Array:
    """Return the sums of absolute values by row and by column."""
    sizes = np.abs(values)
    by_row = sizes.sum(axis=1)
    by_column = sizes.sum(axis=0)
    return np.concatenate([by_row, by_column])


class ScaledVoteTests(BackendCase):
    """Tests of casting scaled votes and of applying them."""

    def _scaled(
        self,
        weight: Weight,
        vote_scale: Array,
        before: _Votes | None = None,
        *,
        limits: VoteLimits = LIMITS,
        draw: expected.Draw = DRAW,
    ) -> VoteState:
        """Return a state for scaled votes that holds the votes ``before``, zeros by default."""
        votes, exponent_votes = before or (None, None)
        return self.state(
            weight,
            votes,
            exponent_votes,
            control=torch.from_numpy(draw.control),
            limits=torch.tensor(limits),
            magnitudes=torch.zeros(vote_scale.shape, device=self.device),
            vote_scale=self.tensor(vote_scale),
        )

    def _cast_scaled(
        self,
        state: VoteState,
        grad: Array,
        x: Array,
        *,
        dtype: torch.dtype | None = None,
        scale: float | None = None,
    ) -> Cast:
        """Run ``cast_scaled_votes`` and return the new contents of the state."""
        return self.cast_into(
            state,
            "cast_scaled_votes",
            self.tensor(grad, dtype),
            self.tensor(x, dtype),
            scale,
        )

    def _cast_whole_numbers(
        self, state: VoteState, grad: Array, x: Array, kind: str
    ) -> tuple[Cast, Array]:
        """Cast votes of whole numbers of a dtype; return the new contents of the state, and the
        gradient of the weight.

        Numbers of int8 have a scale.
        """
        scale = 0.5 if kind == "int8" else None
        got = self._cast_scaled(state, grad, x, dtype=getattr(torch, kind), scale=scale)
        return got, float32(grad.T @ x) * np.float32(scale or 1.0)

    def _lookup_scaled(
        self,
        state: VoteState,
        ids: Array,
        grad: Array,
        scale: float | None,
    ) -> Cast:
        """Run ``embedding_scaled_votes`` and return the new contents of the state."""
        return self.cast_into(
            state,
            "embedding_scaled_votes",
            self.tensor(ids),
            self.tensor(grad),
            scale,
        )

    def _assert_scaled(
        self,
        got: Cast,
        cast: Array,
        weight: Weight,
        before: _Votes,
        limits: VoteLimits = LIMITS,
        touched: Array | bool = True,
    ) -> None:
        """Assert that ``cast`` was cast as the rule says, and only in the rows ``touched``.

        Args:
            got: contents of the state after the cast.
            cast: the vote on each trit.
            weight: the weight that was voted on.
            before: the votes that the state held before.
            limits: the limits of the votes.
            touched: mask of the rows that were voted on, ``[N, 1]``; True stands for all rows.
        """
        votes, exponent_votes = before
        wanted_votes, wanted_exponent_votes = expected.cast_scaled_votes(
            cast,
            weight.trits,
            votes,
            exponent_votes,
            weight.group_size,
            vote_bits=weight.shape.vote_bits,
            exponent_shift=limits.exponent_shift,
            draw=DRAW,
        )
        wanted_votes = np.where(touched, wanted_votes, votes)
        wanted_exponent_votes = np.where(touched, wanted_exponent_votes, exponent_votes)
        assert_array_equal(got.votes, wanted_votes)
        assert_array_equal(got.exponent_votes, wanted_exponent_votes)

    # --- cast_scaled_votes

    @pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
    @pytest.mark.parametrize(("sizes", "bits"), _SIZES_AND_BITS)
    def test_scaled_votes_by_factors_follow_the_rule(
        self,
        sizes: Sizes,
        bits: int,
        kind: str,
    ) -> None:
        rows, out_features, columns = sizes
        weight = self.weight(sum(sizes), out_features, columns, 64, vote_bits=bits)
        # Small integers: every product and sum is exact in each dtype, so the gradient is certain.
        grad = integers(1, rows, out_features, 3)
        x = integers(2, rows, columns, 3)
        before = _votes_of(weight)
        factors = _factors(5, out_features + columns)
        state = self._scaled(weight, factors, before)
        got, gradient = self._cast_whole_numbers(state, grad, x, kind)
        cast = expected.float_votes(gradient, factors, LIMITS.vote_limit, DRAW)
        self._assert_scaled(got, cast, weight, before)

    @pytest.mark.parametrize(("sizes", "bits"), _SIZES_AND_BITS)
    @pytest.mark.parametrize(("low", "high"), [(0, 4), (-7, 5), (14, 17), (-20, -9)])
    def test_scaled_votes_by_shifts_follow_the_rule(
        self,
        low: int,
        high: int,
        sizes: Sizes,
        bits: int,
    ) -> None:
        rows, out_features, columns = sizes
        weight = self.weight(sum(sizes), out_features, columns, 64, vote_bits=bits)
        grad = random_int8(1, rows, out_features)
        x = random_int8(2, rows, columns)
        before = _votes_of(weight)
        rng = np.random.default_rng(6)
        shifts = rng.integers(low, high + 1, out_features + columns)
        shifts = shifts.astype(np.int32)
        limits = VoteLimits(vote_limit=700, exponent_shift=0)
        state = self._scaled(weight, shifts, before, limits=limits)

        got = self._cast_scaled(state, grad, x, scale=2.0**-3)

        gradient = wide(grad.T) @ wide(x)
        cast = expected.integer_votes(
            gradient,
            shifts,
            -3,
            limits.vote_limit,
            DRAW,
        )
        self._assert_scaled(got, cast, weight, before, limits)

    @pytest.mark.parametrize("shift", [0, 1, 7, 31])
    def test_exponent_vote_is_the_shifted_sum_of_its_group(self, shift: int) -> None:
        weight = self.weight(3, 9, 130, 32)
        grad = small_floats(1, 4, 9, 3)
        x = small_floats(2, 4, 130, 3)
        before = _votes_of(weight)
        factors = _factors(7, 9 + 130)
        limits = LIMITS._replace(exponent_shift=shift)
        state = self._scaled(weight, factors, before, limits=limits)

        got = self._cast_scaled(state, grad, x)

        gradient = grad.T @ x
        cast = expected.float_votes(gradient, factors, limits.vote_limit, DRAW)
        self._assert_scaled(got, cast, weight, before, limits)

    def test_positive_gradient_votes_a_trit_down_by_its_size(self) -> None:
        weight = self.weight(0, 1, 32, 32)
        state = self._scaled(weight, np.ones(33, np.float32))
        got = self._cast_scaled(state, float32([[3.0]]), ones(1, 32))
        assert np.all(got.votes == -3)

    @every_size_of_vote
    @pytest.mark.parametrize("sign", [-1, 1])
    def test_scaled_votes_saturate_alike_at_both_ends(self, sign: int, bits: int) -> None:
        weight = self.weight(1, 3, 40, 32, vote_bits=bits)
        largest = weight.shape.largest_vote
        start = filled(-sign * (largest - 1), 3, 40)
        limits = LIMITS._replace(vote_limit=127 * 256)
        state = self._scaled(
            weight,
            np.ones(43, np.float32),
            before=(start, filled(0, 3, 2)),
            limits=limits,
        )
        grad = np.full((2, 3), sign * 1e6, np.float32)
        got = self._cast_scaled(state, grad, ones(2, 40))
        assert np.all(got.votes == -sign * largest)

    def test_nan_casts_no_scaled_vote_and_is_counted(self) -> None:
        weight = self.weight(2, 5, 40, 32)
        grad, x, gradient = gradient_with_nan()
        factors = _factors(1, 45)
        state = self._scaled(weight, factors)

        got = self._cast_scaled(state, grad, x)

        known = np.nan_to_num(gradient, nan=0.0)
        cast = expected.float_votes(known, factors, 1024, DRAW)
        assert_array_equal(got.votes, -cast)
        assert np.all(got.votes[2] == 0)
        assert got.stats[0] == np.isnan(gradient).sum()
        assert np.all(np.isfinite(got.stats))
        assert got.magnitudes is not None
        assert np.all(np.isfinite(got.magnitudes))

    def test_overflow_casts_full_votes_and_nan_products_none(self) -> None:
        weight = self.weight(2, 4, 6, 32)
        row_factors = [3e38, np.inf, np.nan, 1.0]
        column_factors = [3e38, 0.0, 1e-38, np.inf, 1.0, -1.0]
        factors = float32(row_factors + column_factors)
        grad = np.full((1, 4), 2.0, np.float32)
        x = ones(1, 6)
        limits = LIMITS._replace(vote_limit=512)
        state = self._scaled(weight, factors, limits=limits)

        got = self._cast_scaled(state, grad, x)

        cast = expected.float_votes(grad.T @ x, factors, 512, DRAW)
        assert_array_equal(got.votes, -cast)

    @pytest.mark.parametrize("scale", [None, 0.25])
    def test_magnitudes_add_sizes_and_stats_add_squares(self, scale: float | None) -> None:
        weight = self.weight(4, 7, 50, 32)
        grad = integers(1, 3, 7, 3)
        x = integers(2, 3, 50, 3)
        dtype = torch.float32 if scale is None else torch.int8
        before = float32(np.arange(7 + 50))
        state = self._scaled(weight, _factors(2, 57))
        state = state._replace(magnitudes=self.tensor(before))

        got = self._cast_scaled(state, grad, x, dtype=dtype, scale=scale)

        gradient = grad.T @ x * (scale or 1.0)
        # Every number is a small multiple of a power of two: float32 sums them exactly in any
        # order.
        wanted = before + _sizes_by_row_and_column(gradient)
        assert_array_equal(got.magnitudes, wanted)
        assert_array_equal(got.stats, squares_by_row_and_column(gradient))

    def test_integer_magnitudes_are_rounded_once(self) -> None:
        """Sums beyond 2**24 depend neither on the order of summation nor on partial sums."""
        weight = self.weight(5, 33, 300, 64)
        grad = random_int8(1, 512, 33)
        x = random_int8(2, 512, 300)
        state = self._scaled(weight, np.full(333, 9, np.int32))
        scale = 2.0**-5

        got = self._cast_scaled(state, grad, x, scale=scale)

        gradient = wide(grad.T) @ wide(x)
        sums = _sizes_by_row_and_column(gradient)
        assert sums.max() > 2**24
        wanted = float32(sums) * np.float32(scale)
        assert_array_equal(got.magnitudes, wanted)

    def test_scaled_votes_without_exponent_votes(self) -> None:
        weight = self.weight(3, 6, 96, 32)
        grad = small_floats(1, 4, 6, 3)
        x = small_floats(2, 4, 96, 3)
        factors = _factors(3, 102)
        state = self._scaled(weight, factors, limits=VoteLimits())
        state = state._replace(exponent_votes=None)

        self.run(
            "cast_scaled_votes",
            self.tensor(grad),
            self.tensor(x),
            None,
            state,
        )

        cast = expected.float_votes(grad.T @ x, factors, 256, DRAW)
        self.assert_votes(state, -cast)

    def test_rounding_is_independent_per_step_and_unbiased(self) -> None:
        weight = self.weight(6, 64, 96, 32)
        grad = np.full((1, 64), 0.3, np.float32)
        x = ones(1, 96)
        casts = []
        for seed, step, stream in product((0, 1), (0, 1, 1 << 20), (0, 8)):
            draw = expected.Draw(seed, step, stream)
            state = self._scaled(weight, np.ones(160, np.float32), draw=draw)
            cast = self._cast_scaled(state, grad, x)
            casts.append(-cast.votes)

        different = {votes.tobytes() for votes in casts}
        assert len(different) == len(casts)
        votes = np.stack(casts)
        standard_deviation = (0.3 * 0.7 / votes.size) ** 0.5
        assert abs(votes.mean() - 0.3) < 5 * standard_deviation

    @pytest.mark.parametrize("noise_shift", [1, 2, 7, 16])
    @pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "lookup"])
    def test_votes_with_less_noise_follow_the_rule(self, kind: str, noise_shift: int) -> None:
        self.require(NARROW_NOISE)
        weight = self.weight(8, 35, 134, 64)
        grad = integers(1, 6, 35, 3)
        x = integers(2, 6, 134, 3)
        before = _votes_of(weight)
        factors = _factors(5, 35 + 134)
        limits = LIMITS._replace(vote_limit=320, noise_shift=noise_shift)
        state = self._scaled(weight, factors, before, limits=limits)

        if kind == "lookup":
            ids = np.array([3, 0, 3, 7, 34, 3])
            got = self._lookup_scaled(state, ids, float32(x), None)
            gradient = float32(sum_by_row(ids, x, 35))
            touched = np.isin(np.arange(35), ids)[:, None]
        else:
            got, gradient = self._cast_whole_numbers(state, grad, x, kind)
            touched = np.ones((35, 1), bool)

        cast = expected.float_votes(
            gradient,
            factors,
            limits.vote_limit,
            DRAW,
            noise_shift,
        )
        assert set(np.unique(cast * touched)) == {-1, 0, 1}
        self._assert_scaled(got, cast, weight, before, touched=touched)

    def test_votes_by_shifts_refuse_less_noise(self) -> None:
        self.require(NARROW_NOISE)
        weight = self.weight(0, 3, 40, 32)
        limits = LIMITS._replace(noise_shift=1)
        state = self._scaled(weight, np.zeros(43, np.int32), limits=limits)
        grad = filled(1, 2, 3)
        x = filled(1, 2, 40)
        with pytest.raises(ValueError, match="noise_shift"):
            self._cast_scaled(state, grad, x, scale=1.0)

    # --- embedding_scaled_votes

    @every_size_of_vote
    @pytest.mark.parametrize("mode", ["float32", "int8 by factors", "int8 by shifts"])
    def test_lookup_votes_only_for_its_rows(self, mode: str, bits: int) -> None:
        weight = self.weight(10, 11, 70, 32, vote_bits=bits)
        ids = np.array([3, 0, 3, 7, 3])
        grad = integers(1, 5, 70, 40)
        before = _votes_of(weight)
        kind = "float32" if mode == "float32" else "int8"
        scale = None if mode == "float32" else 0.5
        summed = sum_by_row(ids, grad, 11)
        gradient = summed * (scale or 1.0)
        if mode == "int8 by shifts":
            vote_scale = np.full(81, 3, np.int32)
            cast = expected.integer_votes(summed, vote_scale, -1, 1024, DRAW)
        else:
            vote_scale = _factors(4, 81)
            cast = expected.float_votes(gradient, vote_scale, 1024, DRAW)
        state = self._scaled(weight, vote_scale, before)

        got = self._lookup_scaled(state, ids, grad.astype(kind), scale)

        touched = np.isin(np.arange(11), ids)[:, None]
        self._assert_scaled(got, cast, weight, before, touched=touched)
        assert_array_equal(got.magnitudes, _sizes_by_row_and_column(gradient))
        assert_array_equal(got.stats, squares_by_row_and_column(gradient))

    # --- apply_scaled_votes

    @pytest.mark.parametrize("carry", [False, True])
    @every_size_of_vote
    @examples(15)
    @given(
        rows=st.integers(1, 7),
        columns=st.integers(1, 200),
        decay=st.sampled_from([0, 1, 300, 65535, 65536]),
        data=st.data(),
    )
    def test_scaled_crossings_flip_carry_and_decay(
        self,
        rows: int,
        columns: int,
        bits: int,
        decay: int,
        carry: bool,
        data: st.DataObject,
    ) -> None:
        seed = data.draw(st.integers(0, 2**16))
        weight = self.weight(seed, rows, columns, 64, vote_bits=bits)
        largest = weight.shape.largest_vote
        thresholds = {1, largest}
        if bits > 2:
            thresholds |= {2, largest // 2}
        threshold = data.draw(st.sampled_from(sorted(thresholds)))
        votes = random_int8(seed + 1, rows, columns, largest)
        state = self.state(weight, votes, control=torch.from_numpy(DRAW.control))

        flips = self.run("apply_scaled_votes", state, threshold, decay, carry)

        trits, left, count = expected.apply_scaled_votes(
            weight.trits,
            votes,
            threshold,
            decay,
            carry=carry,
            draw=DRAW,
        )
        self.assert_trits(weight, trits)
        self.assert_votes(state, left)
        assert int(flips) == count
        assert torch.equal(weight.packed, self.pack(trits)), "padding has changed"
        stored = self.votes_in(left, bits)
        assert torch.equal(state.votes, stored), "padding of the votes has changed"

    def test_scaled_crossings_of_many_weights_flip_together(self) -> None:
        settings = [(2, 300, True), (3, 0, True), (2, 65536, False), (1, 0, False), (1, 9, True)]
        weights = []
        votes = []
        states = []
        for rows, columns, bits in MANY_WEIGHTS:
            weight = self.weight(rows, rows, columns, 64, vote_bits=bits)
            held = random_int8(columns, rows, columns, weight.shape.largest_vote)
            weights.append(weight)
            votes.append(held)
            states.append(self.state(weight, held, control=torch.from_numpy(DRAW.control)))

        flips = self.run("apply_together", "apply_scaled_votes", states, settings)

        assert flips.dtype == torch.int64
        for index, (threshold, decay, carry) in enumerate(settings):
            trits, left, count = expected.apply_scaled_votes(
                weights[index].trits,
                votes[index],
                threshold,
                decay,
                carry=carry,
                draw=DRAW,
            )
            self.assert_trits(weights[index], trits)
            self.assert_votes(states[index], left)
            assert int(flips[index]) == count

    @pytest.mark.parametrize("carry", [False, True])
    def test_below_the_threshold_without_decay_nothing_changes(self, carry: bool) -> None:
        weight = self.weight(8, 9, 200, 64)
        state = self.state(weight, random_int8(1, 9, 200, 31))
        packed = weight.packed.clone()
        before = state.votes.clone()
        flips = self.run("apply_scaled_votes", state, 32, 0, carry)
        assert int(flips) == 0
        assert torch.equal(weight.packed, packed)
        assert torch.equal(state.votes, before)

    def test_two_bit_votes_are_gone_after_every_step(self) -> None:
        weight = self.weight(9, 5, 77, 32, vote_bits=2)
        for carry in (False, True):
            state = self.state(weight, random_int8(1, 5, 77, 1))
            self.run("apply_scaled_votes", state, 1, 0, carry)
            left = self.votes_out(state.votes, weight.shape)
            assert not left.any()
