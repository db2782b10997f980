"""Backend suite, part 4: votes scaled by row and column, and the flips that they lead to."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from arb_ternary.backends.vote_state import VoteLimits, VoteState
from arb_ternary_testing import restatement_votes as expected
from arb_ternary_testing.backend_case import SHAPES, Array, BackendCase, Weight, examples, float32

# : The words of the counter hash in most tests: a stream as an op gives it, a multiple of the
# number of uses.
DRAW: Final = expected.Draw(seed=2**40 + 5, step=(3 << 20) + 1, stream=8 * 0xCBF43926)
BITS: Final = (8, 4, 2)


def _integers(seed: int, rows: int, columns: int, largest: int) -> Array:
    return np.random.default_rng(seed).integers(-largest, largest + 1, (rows, columns))


def _factors(seed: int, size: int) -> Array:
    """Positive factors of several orders of magnitude, none of them a power of two."""
    return np.exp(np.random.default_rng(seed).uniform(-3, 1, size)).astype(np.float32)


class ScaledVoteTests(BackendCase):
    """Casting scaled votes, and applying them."""

    def _cast_scaled(
        self,
        weight: Weight,
        grad: Array,
        x: Array,
        vote_scale: Array,
        *,
        votes: Array | None = None,
        exponent_votes: Array | None = None,
        dtype: torch.dtype | None = None,
        scale: float | None = None,
        limit: int = 1024,
        shift: int = 2,
        magnitudes: Array | None = None,
        draw: expected.Draw = DRAW,
        ids: Array | None = None,
        noise_shift: int = 0,
    ) -> tuple[Array, Array, Array, Array]:
        """Run the kernel; votes ``[N, K]``, exponent votes ``[N, J]``, statistics and magnitudes
        afterwards.
        """
        shape = weight.shape
        if magnitudes is None:
            magnitudes = np.zeros(shape.out_features + shape.in_features, np.float32)
        factors = self.tensor(vote_scale)
        state = self._scaled(
            weight, factors, draw, VoteLimits(limit, shift, noise_shift), votes, exponent_votes
        )
        state = state._replace(magnitudes=self.tensor(magnitudes))
        operands = (
            (self.tensor(grad, dtype), self.tensor(x, dtype))
            if ids is None
            else (self.tensor(ids), self.tensor(grad))
        )
        fixed = (*operands, weight.packed, factors)
        before = [tensor.clone() for tensor in fixed]
        self.run(
            "cast_scaled_votes" if ids is None else "embedding_scaled_votes",
            *operands,
            None if scale is None else self.tensor(float32(scale)),
            state,
        )
        for tensor, old in zip(fixed, before, strict=True):
            assert torch.equal(tensor.nan_to_num(), old.nan_to_num()), "an input was changed"
        sums = self.array(state.stats), self.array(state.scaling[0])
        return self.votes_out(state.votes, shape), self.array(state.learned), *sums

    def _scaled(
        self,
        weight: Weight,
        vote_scale: Tensor,
        draw: expected.Draw = DRAW,
        limits: VoteLimits = VoteLimits(),  # noqa: B008
        votes: Array | None = None,
        exponent_votes: Array | None = None,
    ) -> VoteState:
        """A state that casts scaled votes, and draws by ``draw``."""
        return self.state(
            weight,
            votes,
            exponent_votes,
            control=torch.from_numpy(draw.control),
            limits=torch.tensor(limits),
            magnitudes=torch.zeros(vote_scale.shape, device=self.device),
            vote_scale=vote_scale,
        )

    def _expect_scaled(
        self,
        got: tuple[Array, Array, Array, Array],
        cast: Array,
        weight: Weight,
        votes: Array,
        exponent_votes: Array,
        shift: int,
    ) -> None:
        shape = weight.shape
        wanted = expected.cast_scaled_votes(
            cast,
            weight.trits,
            votes,
            exponent_votes,
            shape.group_size,
            vote_bits=shape.vote_bits,
            exponent_shift=shift,
            draw=DRAW,
        )
        np.testing.assert_array_equal(got[0], wanted[0])
        np.testing.assert_array_equal(got[1], wanted[1])

    def _state(self, weight: Weight) -> tuple[Array, Array]:
        largest = weight.shape.largest_vote
        rows = weight.shape.out_features
        columns = weight.shape.in_features
        votes = _integers(3, rows, columns, largest).astype(np.int8)
        return votes, _integers(4, rows, weight.shape.groups, 127).astype(np.int8)

    # --- cast_scaled_votes

    @pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
    @pytest.mark.parametrize(
        ("sizes", "bits"), [*((sizes, 8) for sizes in SHAPES), (SHAPES[-2], 4), (SHAPES[-2], 2)]
    )
    def test_scaled_votes_by_factors_are_those_of_the_rule(
        self, sizes: tuple[int, int, int], bits: int, kind: str
    ) -> None:
        rows, out_features, columns = sizes
        weight = self.weight(sum(sizes), out_features, columns, 64, vote_bits=bits)
        # Small whole numbers: every product and sum is exact in each dtype, so that the gradient is
        # certain.
        grad = _integers(1, rows, out_features, 3)
        x = _integers(2, rows, columns, 3)
        votes, exponent_votes = self._state(weight)
        factors = _factors(5, out_features + columns)
        given_kind: Any = np.int8 if kind == "int8" else np.float32
        got = self._cast_scaled(
            weight,
            grad.astype(given_kind),
            x.astype(given_kind),
            factors,
            votes=votes,
            exponent_votes=exponent_votes,
            dtype=None if kind == "int8" else getattr(torch, kind),
            scale=0.5 if kind == "int8" else None,
        )
        gradient = (grad.T @ x).astype(np.float32) * np.float32(0.5 if kind == "int8" else 1.0)
        cast = expected.float_votes(gradient, factors, 1024, DRAW)
        self._expect_scaled(got, cast, weight, votes, exponent_votes, 2)

    @pytest.mark.parametrize(
        ("sizes", "bits"), [*((sizes, 8) for sizes in SHAPES), (SHAPES[-2], 4), (SHAPES[-2], 2)]
    )
    @pytest.mark.parametrize(("low", "high"), [(0, 4), (-7, 5), (14, 17), (-20, -9)])
    def test_scaled_votes_by_shifts_are_those_of_the_rule(
        self, low: int, high: int, sizes: tuple[int, int, int], bits: int
    ) -> None:
        rows, out_features, columns = sizes
        weight = self.weight(sum(sizes), out_features, columns, 64, vote_bits=bits)
        grad = _integers(1, rows, out_features, 127).astype(np.int8)
        x = _integers(2, rows, columns, 127).astype(np.int8)
        votes, exponent_votes = self._state(weight)
        shifts = (
            np.random.default_rng(6)
            .integers(low, high + 1, out_features + columns)
            .astype(np.int32)
        )
        got = self._cast_scaled(
            weight,
            grad,
            x,
            shifts,
            votes=votes,
            exponent_votes=exponent_votes,
            scale=2.0**-3,
            limit=700,
            shift=0,
        )
        gradient = grad.astype(np.int64).T @ x.astype(np.int64)
        cast = expected.integer_votes(gradient, shifts, -3, 700, DRAW)
        self._expect_scaled(got, cast, weight, votes, exponent_votes, 0)

    @pytest.mark.parametrize("shift", [0, 1, 7, 31])
    def test_the_exponents_vote_is_the_shifted_sum_of_its_group(self, shift: int) -> None:
        weight = self.weight(3, 9, 130, 32)
        grad = _integers(1, 4, 9, 3).astype(np.float32)
        x = _integers(2, 4, 130, 3).astype(np.float32)
        votes, exponent_votes = self._state(weight)
        factors = _factors(7, 9 + 130)
        got = self._cast_scaled(
            weight, grad, x, factors, votes=votes, exponent_votes=exponent_votes, shift=shift
        )
        cast = expected.float_votes(grad.T @ x, factors, 1024, DRAW)
        self._expect_scaled(got, cast, weight, votes, exponent_votes, shift)

    def test_a_positive_gradient_votes_a_trit_down_by_its_size(self) -> None:
        weight = self.weight(0, 1, 32, 32)
        votes, *_ = self._cast_scaled(
            weight, float32([[3.0]]), np.ones((1, 32), np.float32), np.ones(33, np.float32)
        )
        assert np.all(votes == -3)

    @pytest.mark.parametrize("bits", BITS)
    @pytest.mark.parametrize("sign", [-1, 1])
    def test_scaled_votes_saturate_alike_at_both_ends(self, sign: int, bits: int) -> None:
        weight = self.weight(1, 3, 40, 32, vote_bits=bits)
        largest = weight.shape.largest_vote
        start = np.full((3, 40), -sign * (largest - 1), np.int8)
        grad = np.full((2, 3), sign * 1e6, np.float32)
        x = np.ones((2, 40), np.float32)
        votes, *_ = self._cast_scaled(
            weight, grad, x, np.ones(43, np.float32), votes=start, limit=127 * 256
        )
        assert np.all(votes == -sign * largest)

    def test_nan_casts_no_scaled_vote_and_is_counted(self) -> None:
        weight = self.weight(2, 5, 40, 32)
        grad = _integers(1, 3, 5, 2).astype(np.float32)
        x = _integers(2, 3, 40, 2).astype(np.float32)
        grad[1, 2] = np.nan
        x[0, 7] = np.nan
        with np.errstate(invalid="ignore"):
            gradient = grad.T @ x
        factors = _factors(1, 45)
        votes, _, stats, magnitudes = self._cast_scaled(weight, grad, x, factors)
        cast = expected.float_votes(np.nan_to_num(gradient, nan=0.0), factors, 1024, DRAW)
        np.testing.assert_array_equal(votes, -cast)
        assert np.all(votes[2] == 0)
        assert stats[0] == np.isnan(gradient).sum()
        assert np.all(np.isfinite(stats))
        assert np.all(np.isfinite(magnitudes))

    def test_factors_that_overflow_cast_full_votes_and_those_without_a_product_cast_none(
        self,
    ) -> None:
        weight = self.weight(2, 4, 6, 32)
        factors = float32([3e38, np.inf, np.nan, 1.0, 3e38, 0.0, 1e-38, np.inf, 1.0, -1.0])
        grad = np.full((1, 4), 2.0, np.float32)
        x = np.ones((1, 6), np.float32)
        votes, *_ = self._cast_scaled(weight, grad, x, factors, limit=512)
        np.testing.assert_array_equal(votes, -expected.float_votes(grad.T @ x, factors, 512, DRAW))

    @pytest.mark.parametrize("scale", [None, 0.25])
    def test_magnitudes_add_absolute_values_and_statistics_add_squares(
        self, scale: float | None
    ) -> None:
        weight = self.weight(4, 7, 50, 32)
        grad = _integers(1, 3, 7, 3)
        x = _integers(2, 3, 50, 3)
        kind: Any = np.float32 if scale is None else np.int8
        before = np.arange(7 + 50).astype(np.float32)
        got = self._cast_scaled(
            weight,
            grad.astype(kind),
            x.astype(kind),
            _factors(2, 57),
            scale=scale,
            magnitudes=before.copy(),
        )
        gradient = (grad.T @ x).astype(np.float64) * (scale or 1.0)
        # Every number is a small multiple of a power of two: float32 sums them exactly in any
        # order.
        sizes = np.abs(gradient)
        squares = gradient**2
        np.testing.assert_array_equal(
            got[3], before + np.concatenate([sizes.sum(axis=1), sizes.sum(axis=0)])
        )
        np.testing.assert_array_equal(
            got[2], np.concatenate([[0.0], squares.sum(axis=1), squares.sum(axis=0)])
        )

    def test_the_magnitudes_of_integers_are_rounded_once(self) -> None:
        """Sums beyond 2**24 do not depend on the order in which, or the pieces of which, they are
        taken.
        """
        weight = self.weight(5, 33, 300, 64)
        grad = _integers(1, 512, 33, 127).astype(np.int8)
        x = _integers(2, 512, 300, 127).astype(np.int8)
        *_, magnitudes = self._cast_scaled(
            weight, grad, x, np.full(333, 9, np.int32), scale=2.0**-5
        )
        sizes = np.abs(grad.astype(np.int64).T @ x.astype(np.int64))
        sums = np.concatenate([sizes.sum(axis=1), sizes.sum(axis=0)])
        assert sums.max() > 2**24
        np.testing.assert_array_equal(magnitudes, sums.astype(np.float32) * np.float32(2.0**-5))

    def test_without_exponent_votes_only_trits_are_voted_on_by_scale(self) -> None:
        weight = self.weight(3, 6, 96, 32)
        grad = _integers(1, 4, 6, 3).astype(np.float32)
        x = _integers(2, 4, 96, 3).astype(np.float32)
        factors = _factors(3, 102)
        state = self._scaled(weight, self.tensor(factors))._replace(exponent_votes=None)
        self.run("cast_scaled_votes", self.tensor(grad), self.tensor(x), None, state)
        cast = expected.float_votes(grad.T @ x, factors, 256, DRAW)
        np.testing.assert_array_equal(self.votes_out(state.votes, weight.shape), -cast)

    def test_rounding_is_independent_per_step_and_unbiased(self) -> None:
        weight = self.weight(6, 64, 96, 32)
        grad = np.full((1, 64), 0.3, np.float32)
        x = np.ones((1, 96), np.float32)
        draws = [
            expected.Draw(seed, step, stream)
            for seed in (0, 1)
            for step in (0, 1, 1 << 20)
            for stream in (0, 8)
        ]
        cast = [
            -self._cast_scaled(weight, grad, x, np.ones(160, np.float32), draw=draw)[0]
            for draw in draws
        ]
        assert len({votes.tobytes() for votes in cast}) == len(draws)
        count = sum(votes.size for votes in cast)
        mean = sum(int(votes.sum()) for votes in cast) / count
        assert abs(mean - 0.3) < 5 * (0.3 * 0.7 / count) ** 0.5

    @pytest.mark.parametrize("noise_shift", [1, 2, 7, 16])
    @pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "lookup"])
    def test_votes_with_less_noise_are_those_of_the_rule(self, kind: str, noise_shift: int) -> None:
        self.skip_without_narrow_noise()
        weight = self.weight(8, 35, 134, 64, vote_bits=8)
        grad = _integers(1, 6, 35, 3)
        x = _integers(2, 6, 134, 3)
        votes, exponent_votes = self._state(weight)
        factors = _factors(5, 35 + 134)
        ids = np.array([3, 0, 3, 7, 34, 3]) if kind == "lookup" else None
        given_kind: Any = np.int8 if kind == "int8" else np.float32
        got = self._cast_scaled(
            weight,
            (grad if ids is None else x).astype(given_kind),
            x.astype(given_kind),
            factors,
            votes=votes,
            exponent_votes=exponent_votes,
            dtype=torch.bfloat16 if kind == "bfloat16" else None,
            scale=0.5 if kind == "int8" else None,
            limit=320,
            ids=ids,
            noise_shift=noise_shift,
        )
        gradient = (grad.T @ x).astype(np.float32) * np.float32(0.5 if kind == "int8" else 1.0)
        touched = np.ones((35, 1), bool)
        if ids is not None:
            gradient = np.zeros((35, 134), np.float32)
            np.add.at(gradient, ids, x)
            touched = np.isin(np.arange(35), ids)[:, None]
        cast = expected.float_votes(gradient, factors, 320, DRAW, noise_shift) * touched
        assert set(np.unique(cast)) == {-1, 0, 1}
        wanted = expected.cast_scaled_votes(
            cast, weight.trits, votes, exponent_votes, 64, vote_bits=8, exponent_shift=2, draw=DRAW
        )
        np.testing.assert_array_equal(got[0], wanted[0])
        np.testing.assert_array_equal(got[1], np.where(touched, wanted[1], exponent_votes))

    def test_votes_by_shifts_refuse_less_noise(self) -> None:
        self.skip_without_narrow_noise()
        weight = self.weight(0, 3, 40, 32)
        grad = np.ones((2, 3), np.int8)
        x = np.ones((2, 40), np.int8)
        with pytest.raises(ValueError, match="noise_shift"):
            self._cast_scaled(weight, grad, x, np.zeros(43, np.int32), scale=1.0, noise_shift=1)

    # --- embedding_scaled_votes

    @pytest.mark.parametrize("bits", BITS)
    @pytest.mark.parametrize("mode", ["float32", "int8 by factors", "int8 by shifts"])
    def test_lookup_votes_only_for_its_rows(self, mode: str, bits: int) -> None:
        weight = self.weight(10, 11, 70, 32, vote_bits=bits)
        ids = np.array([3, 0, 3, 7, 3])
        grad = _integers(1, 5, 70, 40)
        votes, exponent_votes = self._state(weight)
        shifts = mode == "int8 by shifts"
        vote_scale = np.full(81, 3, np.int32) if shifts else _factors(4, 81)
        scale = None if mode == "float32" else 0.5
        got = self._cast_scaled(
            weight,
            grad.astype(np.float32 if scale is None else np.int8),
            np.zeros(0),
            vote_scale,
            votes=votes,
            exponent_votes=exponent_votes,
            scale=scale,
            ids=ids,
        )
        summed = np.zeros((11, 70), np.int64)
        np.add.at(summed, ids, grad)
        gradient = summed * (scale or 1.0)
        if shifts:
            cast = expected.integer_votes(summed, vote_scale, -1, 1024, DRAW)
        else:
            cast = expected.float_votes(gradient.astype(np.float32), vote_scale, 1024, DRAW)
        wanted = expected.cast_scaled_votes(
            cast,
            weight.trits,
            votes,
            exponent_votes,
            32,
            vote_bits=bits,
            exponent_shift=2,
            draw=DRAW,
        )
        touched = np.isin(np.arange(11), ids)[:, None]
        np.testing.assert_array_equal(got[0], np.where(touched, wanted[0], votes))
        np.testing.assert_array_equal(got[1], np.where(touched, wanted[1], exponent_votes))
        sizes = np.abs(gradient)
        squares = gradient**2
        np.testing.assert_array_equal(
            got[3], np.concatenate([sizes.sum(axis=1), sizes.sum(axis=0)])
        )
        np.testing.assert_array_equal(
            got[2], np.concatenate([[0.0], squares.sum(axis=1), squares.sum(axis=0)])
        )

    # --- apply_scaled_votes

    @pytest.mark.parametrize("carry", [False, True])
    @pytest.mark.parametrize("bits", BITS)
    @examples(15)
    @given(
        rows=st.integers(1, 7),
        columns=st.integers(1, 200),
        decay=st.sampled_from([0, 1, 300, 65535, 65536]),
        data=st.data(),
    )
    def test_scaled_crossings_flip_carry_and_decay_as_the_rule_says(
        self, rows: int, columns: int, bits: int, decay: int, carry: bool, data: st.DataObject
    ) -> None:
        seed = data.draw(st.integers(0, 2**16))
        weight = self.weight(seed, rows, columns, 64, vote_bits=bits)
        largest = weight.shape.largest_vote
        threshold = data.draw(
            st.sampled_from(sorted({1, 2, largest // 2, largest} - {0, 2 if bits == 2 else 0}))
        )
        votes = _integers(seed + 1, rows, columns, largest).astype(np.int8)
        state = self.state(weight, votes, control=torch.from_numpy(DRAW.control))
        flips = self.run("apply_scaled_votes", state, threshold, decay, carry)
        trits, left, count = expected.apply_scaled_votes(
            weight.trits, votes, threshold, decay, carry=carry, draw=DRAW
        )
        np.testing.assert_array_equal(self.trits_out(weight.packed, weight.shape), trits)
        np.testing.assert_array_equal(self.votes_out(state.votes, weight.shape), left)
        assert int(flips) == count
        assert torch.equal(weight.packed, self.run("pack", self.tensor(trits))), (
            "padding has changed"
        )
        assert torch.equal(state.votes, self.votes_in(left, bits)), (
            "padding of the votes has changed"
        )

    @pytest.mark.parametrize("carry", [False, True])
    def test_below_the_threshold_and_without_decay_nothing_changes_bit_for_bit(
        self, carry: bool
    ) -> None:
        weight = self.weight(8, 9, 200, 64)
        votes = _integers(1, 9, 200, 31).astype(np.int8)
        state = self.state(weight, votes)
        packed = weight.packed.clone()
        before = state.votes.clone()
        flips = self.run("apply_scaled_votes", state, 32, 0, carry)
        assert int(flips) == 0
        assert torch.equal(weight.packed, packed)
        assert torch.equal(state.votes, before)

    def test_two_bit_votes_are_gone_after_every_step(self) -> None:
        weight = self.weight(9, 5, 77, 32, vote_bits=2)
        for carry in (False, True):
            state = self.state(weight, _integers(1, 5, 77, 1).astype(np.int8))
            self.run("apply_scaled_votes", state, 1, 0, carry)
            assert not self.votes_out(state.votes, weight.shape).any()
