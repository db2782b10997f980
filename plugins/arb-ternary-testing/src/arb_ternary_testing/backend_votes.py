"""Backend suite, part 3: casting votes, flipping trits and moving exponents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from torch.utils._python_dispatch import TorchDispatchMode

from arb_ternary.backends.protocol import FUSED_VOTES
from arb_ternary_testing import restatement as expected
from arb_ternary_testing.backend_case import (
    MANY_WEIGHTS,
    BackendCase,
    Cast,
    Sizes,
    Weight,
    any_int8,
    every_group_size,
    every_shape,
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
from arb_ternary_testing.restatement import Array, float32, int8, wide


class VoteTests(BackendCase):
    """Tests of votes, flips and exponents."""

    def _cast(
        self,
        weight: Weight,
        grad: Array,
        x: Array,
        *,
        votes: Array | None = None,
        exponent_votes: Array | None = None,
        dtype: torch.dtype | None = None,
        scale: float | None = None,
        stats: Array | None = None,
    ) -> Cast:
        """Run ``cast_votes`` on a state with these votes and return its new contents."""
        state = self.state(weight, votes, exponent_votes)
        if stats is not None:
            state = state._replace(stats=self.tensor(stats))
        return self.cast_into(
            state,
            "cast_votes",
            self.tensor(grad, dtype),
            self.tensor(x, dtype),
            scale,
        )

    def _assert_cast(
        self,
        got: Cast,
        gradient: Array,
        weight: Weight,
        votes: Array,
        exponent_votes: Array,
    ) -> None:
        """Assert that the votes are those that the rule casts for this gradient."""
        wanted_votes, wanted_exponent_votes = expected.cast_votes(
            gradient,
            weight.trits,
            votes,
            exponent_votes,
            weight.group_size,
        )
        assert_array_equal(got.votes, wanted_votes)
        assert_array_equal(got.exponent_votes, wanted_exponent_votes)

    # --- cast_votes

    @pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
    @every_group_size
    @every_shape
    def test_votes_and_exponent_votes_follow_the_rule(
        self,
        sizes: Sizes,
        group_size: int,
        kind: str,
    ) -> None:
        rows, out_features, columns = sizes
        weight = self.weight(sum(sizes), out_features, columns, group_size)
        # Small integers: every product and sum is exact in each dtype, zeros included, so the
        # sign is certain.
        grad = integers(1, rows, out_features, 3)
        x = integers(2, rows, columns, 3)
        votes = random_int8(3, out_features, columns, 100)
        exponent_votes = random_int8(4, out_features, weight.shape.groups, 100)

        got = self._cast(
            weight,
            grad,
            x,
            votes=votes,
            exponent_votes=exponent_votes,
            dtype=getattr(torch, kind),
            scale=0.5 if kind == "int8" else None,
        )

        self._assert_cast(got, grad.T @ x, weight, votes, exponent_votes)

    def test_a_positive_gradient_votes_a_trit_down(self) -> None:
        weight = self.weight(0, 1, 32, 32)
        got = self._cast(weight, float32([[2.0]]), ones(1, 32))
        assert np.all(got.votes == -1)

    @pytest.mark.parametrize(
        ("start", "sign"),
        [(127, -1.0), (-128, 1.0), (126, -1.0), (-127, 1.0)],
    )
    def test_votes_saturate_and_never_wrap(self, start: int, sign: float) -> None:
        trits = filled(int(sign), 3, 40)
        weight = self.weight_of(trits, filled(-3, 3, 2), 32)
        votes = filled(start, 3, 40)
        opposite_end = min(-start, 127)
        exponent_votes = filled(opposite_end, 3, 2)
        grad = np.full((2, 3), sign, np.float32)
        x = ones(2, 40)

        got = self._cast(
            weight,
            grad,
            x,
            votes=votes,
            exponent_votes=exponent_votes,
        )

        self._assert_cast(got, grad.T @ x, weight, votes, exponent_votes)
        assert abs(int(got.votes[0, 0])) >= 127

    def test_the_largest_int8_gradient_does_not_overflow(self) -> None:
        weight = self.weight(1, 4, 64, 32)
        rows = 3000
        grad = filled(127, rows, 4)
        x = filled(127, rows, 64)
        got = self._cast(weight, grad, x, scale=1.0)
        assert np.all(got.votes == -1)
        total = float(127 * 127 * rows)
        by_row = got.stats[1:5]
        tolerance = 66 * expected.FLOAT32_ROUNDOFF
        np.testing.assert_allclose(by_row, 64 * total**2, rtol=tolerance)

    def test_nan_casts_no_vote_and_is_counted(self) -> None:
        weight = self.weight(2, 5, 40, 32)
        grad, x, gradient = gradient_with_nan()

        got = self._cast(weight, grad, x)

        no_votes = filled(0, 5, 40)
        no_exponent_votes = filled(0, 5, 2)
        self._assert_cast(got, gradient, weight, no_votes, no_exponent_votes)
        assert np.all(got.votes[2] == 0)
        assert np.all(got.votes[:, 7] == 0)
        assert got.stats[0] == np.isnan(gradient).sum() == 40 + 5 - 1
        assert np.all(np.isfinite(got.stats))

    def test_without_exponent_votes_only_trits_are_voted_on(self) -> None:
        weight = self.weight(3, 6, 96, 32)
        grad = small_floats(1, 4, 6, 3)
        x = small_floats(2, 4, 96, 3)
        state = self.state(weight)._replace(exponent_votes=None)
        self.run("cast_votes", self.tensor(grad), self.tensor(x), None, state)
        self.assert_votes(state, -np.sign(grad.T @ x))

    @pytest.mark.parametrize("scale", [None, 0.25])
    def test_stats_add_squared_gradients_by_row_and_column(self, scale: float | None) -> None:
        weight = self.weight(4, 7, 50, 32)
        grad = integers(1, 3, 7, 3)
        x = integers(2, 3, 50, 3)
        dtype = torch.float32 if scale is None else torch.int8
        before = float32(np.arange(1 + 7 + 50))

        got = self._cast(weight, grad, x, dtype=dtype, scale=scale, stats=before)

        # Every number is a small multiple of a power of two: float32 sums them exactly in any
        # order.
        gradient = grad.T @ x * (scale or 1.0)
        wanted = before + squares_by_row_and_column(gradient)
        assert_array_equal(got.stats, float32(wanted))

    def test_every_micro_batch_casts_its_own_votes(self) -> None:
        weight = self.weight(5, 4, 33, 32)
        votes = filled(0, 4, 33)
        exponent_votes = filled(0, 4, 2)
        state = self.state(weight)
        for seed in range(3):
            grad = small_floats(seed, 2, 4, 3)
            x = small_floats(seed + 9, 2, 33, 3)
            self.run("cast_votes", self.tensor(grad), self.tensor(x), None, state)
            votes, exponent_votes = expected.cast_votes(
                grad.T @ x,
                weight.trits,
                votes,
                exponent_votes,
                32,
            )
        self.assert_votes(state, votes)
        self.assert_equal(state.learned, exponent_votes)

    def test_fused_votes_materialise_no_gradient(self) -> None:
        self.require(FUSED_VOTES)
        weight = self.weight(6, 256, 512, 128)
        grad = self.tensor(small_floats(1, 8, 256, 3))
        x = self.tensor(small_floats(2, 8, 512, 3))
        state = self.state(weight)
        largest = _LargestTensor()
        with largest:
            self.run("cast_votes", grad, x, None, state)
        assert largest.nbytes < 256 * 512, f"a tensor of {largest.nbytes} bytes was made"

    # --- apply_votes

    @examples(40)
    @given(
        rows=st.integers(1, 9),
        columns=st.integers(1, 300),
        threshold=st.sampled_from([1, 2, 31, 32, 126, 127]),
        leak=st.sampled_from([0, 1, 5]),
        seed=st.integers(0, 2**16),
    )
    def test_crossings_flip_trits_by_one_step(
        self,
        rows: int,
        columns: int,
        threshold: int,
        leak: int,
        seed: int,
    ) -> None:
        weight = self.weight(seed, rows, columns, 64)
        votes = any_int8(seed + 1, rows, columns)
        state = self.state(weight, votes)

        flips = self.run("apply_votes", state, threshold, leak)

        trits, left, count = expected.apply_votes(weight.trits, votes, threshold, leak)
        self.assert_trits(weight, trits)
        self.assert_votes(state, left)
        assert int(flips) == count

    def test_from_minus_one_to_plus_one_takes_two_crossings(self) -> None:
        weight = self.weight_of(filled(-1, 1, 32), filled(0, 1, 1), 32)
        seen = []
        for _ in range(3):
            state = self.state(weight, filled(127, 1, 32))
            flips = self.run("apply_votes", state, 32, 0)
            trits = self.trits_out(weight.packed, weight.shape)
            seen.append((int(trits[0, 0]), int(flips)))
            assert not self.votes_out(state.votes, weight.shape).any()
        assert seen == [(0, 32), (1, 32), (1, 0)]

    def test_below_the_threshold_nothing_changes(self) -> None:
        weight = self.weight(8, 9, 200, 64)
        votes = random_int8(1, 9, 200, 31)
        packed = weight.packed.clone()
        state = self.state(weight, votes)
        flips = self.run("apply_votes", state, 32, 0)
        assert int(flips) == 0
        assert torch.equal(weight.packed, packed)
        self.assert_votes(state, votes)

    def test_padding_never_flips(self) -> None:
        """After many crossings the packed form is still the one that packing the trits gives."""
        weight = self.weight(9, 3, 131, 32)
        state = self.state(weight, filled(127, 3, 131))
        self.run("apply_votes", state, 1, 0)
        trits = self.trits_out(weight.packed, weight.shape)
        assert torch.equal(weight.packed, self.pack(trits))

    # --- apply_exponent_votes

    @examples(40)
    @given(
        rows=st.integers(1, 7),
        groups=st.integers(1, 5),
        threshold=st.sampled_from([1, 4, 32, 127]),
        band=st.integers(0, 3),
        leak=st.sampled_from([0, 1]),
        per_row=st.booleans(),
        seed=st.integers(0, 2**16),
    )
    def test_exponents_move_one_step_within_their_band(
        self,
        rows: int,
        groups: int,
        threshold: int,
        band: int,
        leak: int,
        per_row: bool,
        seed: int,
    ) -> None:
        rng = np.random.default_rng(seed)
        origins = (rows, 1) if per_row else (1, 1)
        origin = int8(rng.integers(-9, 4, origins))
        moves = rng.integers(-band, band + 1, (rows, groups))
        exponent = int8(origin + moves)
        votes = int8(rng.integers(-128, 128, (rows, groups)))
        weight = self.weight_of(filled(0, rows, 32 * groups), exponent, 32)
        state = self.state(weight, exponent_votes=votes, origin=self.tensor(origin))

        moved = self.run("apply_exponent_votes", state, threshold, band, leak)

        wanted, left, count = expected.apply_exponent_votes(
            exponent,
            votes,
            np.broadcast_to(origin, exponent.shape),
            threshold,
            band,
            leak,
        )
        self.assert_equal(state.exponent, wanted)
        self.assert_equal(state.learned, left)
        assert int(moved) == count

    def test_exponents_keep_powers_of_two_normal_floats(self) -> None:
        exponent = np.array([[-126, 127]], np.int8)
        votes = np.array([[-128, 127]], np.int8)
        weight = self.weight_of(filled(0, 1, 64), exponent, 32)
        state = self.state(weight, exponent_votes=votes)
        self.run("apply_exponent_votes", state, 1, 3, 0)
        self.assert_equal(state.exponent, exponent)

    # --- apply_together

    def test_crossings_of_many_weights_flip_together(self) -> None:
        settings = [(32, 0), (32, 1), (1, 5), (127, 0), (31, 1)]
        weights = []
        votes = []
        states = []
        for rows, columns, _ in MANY_WEIGHTS:
            weight = self.weight(rows, rows, columns, 64)
            held = any_int8(columns, rows, columns)
            weights.append(weight)
            votes.append(held)
            states.append(self.state(weight, held))

        flips = self.run("apply_together", "apply_votes", states, settings)

        assert flips.dtype == torch.int64
        for index, (threshold, leak) in enumerate(settings):
            trits, left, count = expected.apply_votes(
                weights[index].trits,
                votes[index],
                threshold,
                leak,
            )
            self.assert_trits(weights[index], trits)
            self.assert_votes(states[index], left)
            assert int(flips[index]) == count

    def test_exponents_of_many_weights_move_together(self) -> None:
        settings = [(4, 3, 1), (32, 1, 0), (1, 2, 5)]
        origins = [filled(0, 7, 1), filled(0, 1, 1), filled(-1, 300, 9)]
        exponents = []
        votes = []
        states = []
        for rows, groups, origin in zip((7, 1, 300), (3, 1, 9), origins, strict=True):
            exponent = int8(integers(rows, rows, groups, 2))
            held = any_int8(groups, rows, groups)
            weight = self.weight_of(filled(0, rows, 32 * groups), exponent, 32)
            exponents.append(exponent)
            votes.append(held)
            states.append(
                self.state(weight, exponent_votes=held, origin=self.tensor(origin)),
            )

        moves = self.run("apply_together", "apply_exponent_votes", states, settings)

        for index, (threshold, band, leak) in enumerate(settings):
            wanted, left, count = expected.apply_exponent_votes(
                exponents[index],
                votes[index],
                np.broadcast_to(origins[index], exponents[index].shape),
                threshold,
                band,
                leak,
            )
            self.assert_equal(states[index].exponent, wanted)
            self.assert_equal(states[index].learned, left)
            assert int(moves[index]) == count

    # --- embedding_votes

    @pytest.mark.parametrize("kind", ["float32", "int8"])
    @pytest.mark.parametrize("correlated", [False, True])
    def test_lookup_votes_once_per_row_that_was_looked_up(
        self,
        kind: str,
        correlated: bool,
    ) -> None:
        weight = self.weight(10, 11, 70, 32)
        ids = np.array([3, 0, 3, 7, 3])
        grad = integers(1, 5, 70, 4)
        # The sum over row 3 is -1: no single row decides.
        grad[0] = 3
        grad[2] = -2
        grad[4] = -2
        votes = random_int8(2, 11, 70, 100)
        exponent_votes = random_int8(3, 11, 3, 100)
        correlation = integers(4, 11, 3, 30000).astype(np.int16)
        steps = np.abs(integers(5, 11, 3, 9)).astype(np.int32)
        state = self.state(weight, votes, exponent_votes)
        if correlated:
            state = state._replace(
                exponent_votes=None,
                correlation=self.tensor(correlation),
                steps=self.tensor(steps),
            )
        scale = None if kind == "float32" else self.scalar(1.0)

        self.run(
            "embedding_votes",
            self.tensor(ids),
            self.tensor(grad.astype(kind)),
            scale,
            state,
        )

        summed = sum_by_row(ids, grad, 11)
        touched = np.isin(np.arange(11), ids)[:, None]
        wanted_votes, wanted_exponent_votes = expected.cast_votes(
            summed,
            weight.trits,
            votes,
            exponent_votes,
            32,
        )
        self.assert_votes(state, np.where(touched, wanted_votes, votes))
        if state.correlation is not None and state.steps is not None:
            score = expected.group_score(np.sign(summed) * weight.trits, 32)
            total = wide(correlation) + score
            total = np.clip(total, -(2**15), 2**15 - 1)
            wanted = np.where(touched, total, correlation)
            self.assert_equal(state.correlation, wanted)
            self.assert_equal(state.steps, steps + touched)
        else:
            wanted = np.where(touched, wanted_exponent_votes, exponent_votes)
            self.assert_equal(state.learned, wanted)
        squares = squares_by_row_and_column(summed)
        self.assert_equal(state.stats, float32(squares))


class _LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the size of the largest new tensor that any torch operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {_address(value) for value in args if isinstance(value, torch.Tensor)}
        values = result
        if not isinstance(result, tuple | list):
            values = (result,)
        for value in values:
            if isinstance(value, torch.Tensor) and _address(value) not in inputs:
                self.nbytes = max(self.nbytes, value.nbytes)
        return result


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
