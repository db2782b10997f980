"""Backend suite, part 3: casting votes, flipping trits and moving exponents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from arb_ternary.backends.protocol import FUSED_VOTES
from arb_ternary_testing import restatement as expected
from arb_ternary_testing.backend_case import (
    GROUP_SIZES,
    SHAPES,
    Array,
    BackendCase,
    Weight,
    examples,
    float32,
)


class VoteTests(BackendCase):
    """Votes, flips and exponents."""

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
    ) -> tuple[Array, Array, Array]:
        """Run the kernel; votes ``[N, K]``, exponent votes ``[N, J]`` and statistics afterwards."""
        shape = weight.shape
        others = {} if stats is None else {"stats": self.tensor(stats)}
        state = self.state(weight, votes, exponent_votes, **others)
        fixed = self.tensor(grad, dtype), self.tensor(x, dtype), weight.packed
        before = [tensor.clone() for tensor in fixed]
        self.run(
            "cast_votes", *fixed[:2], None if scale is None else self.tensor(float32(scale)), state
        )
        for tensor, old in zip(fixed, before, strict=True):
            assert torch.equal(tensor.nan_to_num(), old.nan_to_num()), "an input was changed"
        return (
            self.votes_out(state.votes, shape),
            self.array(state.learned),
            self.array(state.stats),
        )

    def _integers(self, seed: int, rows: int, columns: int, largest: int) -> Array:
        return np.random.default_rng(seed).integers(-largest, largest + 1, (rows, columns))

    # --- cast_votes

    @pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
    @pytest.mark.parametrize("group_size", GROUP_SIZES)
    @pytest.mark.parametrize("sizes", SHAPES)
    def test_votes_and_exponent_scores_are_those_of_the_rule(
        self, sizes: tuple[int, int, int], group_size: int, kind: str
    ) -> None:
        rows, out_features, columns = sizes
        weight = self.weight(sum(sizes), out_features, columns, group_size)
        # Small whole numbers: every product and sum is exact in each dtype, zeros included, so the
        # sign is certain.
        grad = self._integers(1, rows, out_features, 3)
        x = self._integers(2, rows, columns, 3)
        votes = self._integers(3, out_features, columns, 100).astype(np.int8)
        exponent_votes = self._integers(4, out_features, weight.shape.groups, 100).astype(np.int8)
        if kind == "int8":
            got = self._cast(
                weight,
                grad.astype(np.int8),
                x.astype(np.int8),
                votes=votes,
                exponent_votes=exponent_votes,
                scale=0.5,
            )
        else:
            got = self._cast(
                weight,
                grad.astype(np.float32),
                x.astype(np.float32),
                votes=votes,
                exponent_votes=exponent_votes,
                dtype=getattr(torch, kind),
            )
        wanted = expected.cast_votes(
            grad.T @ x, weight.trits, votes, exponent_votes, weight.shape.group_size
        )
        np.testing.assert_array_equal(got[0], wanted[0])
        np.testing.assert_array_equal(got[1], wanted[1])

    def test_a_positive_gradient_votes_a_trit_down(self) -> None:
        weight = self.weight(0, 1, 32, 32)
        votes, _, _ = self._cast(weight, float32([[2.0]]), np.ones((1, 32), np.float32))
        assert np.all(votes == -1)

    @pytest.mark.parametrize(
        ("start", "sign"), [(127, -1.0), (-128, 1.0), (126, -1.0), (-127, 1.0)]
    )
    def test_votes_saturate_and_never_wrap(self, start: int, sign: float) -> None:
        weight = self.weight_of(
            np.full((3, 40), int(sign), np.int8), np.full((3, 2), -3, np.int8), 32
        )
        votes = np.full((3, 40), start, np.int8)
        exponent_votes = np.full((3, 2), -start if start > -128 else 127, np.int8)
        got = self._cast(
            weight,
            np.full((2, 3), sign, np.float32),
            np.ones((2, 40), np.float32),
            votes=votes,
            exponent_votes=exponent_votes,
        )
        wanted = expected.cast_votes(
            np.full((3, 40), sign), weight.trits, votes, exponent_votes, 32
        )
        np.testing.assert_array_equal(got[0], wanted[0])
        np.testing.assert_array_equal(got[1], wanted[1])
        assert abs(int(got[0][0, 0])) >= 127

    def test_the_largest_int8_gradient_does_not_overflow(self) -> None:
        weight = self.weight(1, 4, 64, 32)
        rows = 3000
        grad = np.full((rows, 4), 127, np.int8)
        x = np.full((rows, 64), 127, np.int8)
        votes, _, stats = self._cast(weight, grad, x, scale=1.0)
        assert np.all(votes == -1)
        total = float(127 * 127 * rows)
        np.testing.assert_allclose(stats[1:5], 64 * total**2, rtol=66 * expected.FLOAT32_ROUNDOFF)

    def test_nan_casts_no_vote_and_is_counted(self) -> None:
        weight = self.weight(2, 5, 40, 32)
        grad = self._integers(1, 3, 5, 2).astype(np.float32)
        x = self._integers(2, 3, 40, 2).astype(np.float32)
        grad[1, 2] = np.nan
        x[0, 7] = np.nan
        with np.errstate(invalid="ignore"):
            gradient = grad.T @ x
        got = self._cast(weight, grad, x)
        zero = np.zeros((5, 40), np.int8), np.zeros((5, 2), np.int8)
        wanted = expected.cast_votes(gradient, weight.trits, *zero, 32)
        np.testing.assert_array_equal(got[0], wanted[0])
        np.testing.assert_array_equal(got[1], wanted[1])
        assert np.all(got[0][2] == 0)
        assert np.all(got[0][:, 7] == 0)
        assert got[2][0] == np.isnan(gradient).sum() == 40 + 5 - 1
        assert np.all(np.isfinite(got[2]))

    def test_without_exponent_votes_only_trits_are_voted_on(self) -> None:
        weight = self.weight(3, 6, 96, 32)
        grad = self._integers(1, 4, 6, 3).astype(np.float32)
        x = self._integers(2, 4, 96, 3).astype(np.float32)
        state = self.state(weight)._replace(exponent_votes=None)
        self.run("cast_votes", self.tensor(grad), self.tensor(x), None, state)
        np.testing.assert_array_equal(
            self.votes_out(state.votes, weight.shape), -np.sign(grad.T @ x)
        )

    @pytest.mark.parametrize("scale", [None, 0.25])
    def test_statistics_add_the_squares_of_the_gradient_by_row_and_by_column(
        self, scale: float | None
    ) -> None:
        weight = self.weight(4, 7, 50, 32)
        grad = self._integers(1, 3, 7, 3)
        x = self._integers(2, 3, 50, 3)
        kind: Any = np.float32 if scale is None else np.int8
        before = np.arange(1 + 7 + 50).astype(np.float32)
        _, _, stats = self._cast(
            weight, grad.astype(kind), x.astype(kind), scale=scale, stats=before
        )
        squares = (grad.T @ x).astype(np.float64) ** 2 * (scale or 1.0) ** 2
        # Every number is a small multiple of a power of two: float32 sums them exactly in any
        # order.
        wanted = before + np.concatenate([[0.0], squares.sum(axis=1), squares.sum(axis=0)])
        np.testing.assert_array_equal(stats, wanted.astype(np.float32))

    def test_every_micro_batch_casts_its_own_votes(self) -> None:
        weight = self.weight(5, 4, 33, 32)
        votes = np.zeros((4, 33), np.int8)
        exponent_votes = np.zeros((4, 2), np.int8)
        state = self.state(weight)
        for seed in range(3):
            grad = self._integers(seed, 2, 4, 3).astype(np.float32)
            x = self._integers(seed + 9, 2, 33, 3).astype(np.float32)
            self.run("cast_votes", self.tensor(grad), self.tensor(x), None, state)
            votes, exponent_votes = expected.cast_votes(
                grad.T @ x, weight.trits, votes, exponent_votes, 32
            )
        np.testing.assert_array_equal(self.votes_out(state.votes, weight.shape), votes)
        np.testing.assert_array_equal(self.array(state.learned), exponent_votes)

    def test_fused_votes_materialise_no_gradient(self) -> None:
        if FUSED_VOTES not in self.backend.capabilities:
            pytest.skip(f"backend {self.backend.name!r} does not declare {FUSED_VOTES}")
        weight = self.weight(6, 256, 512, 128)
        grad = self._integers(1, 8, 256, 3).astype(np.float32)
        x = self._integers(2, 8, 512, 3).astype(np.float32)
        largest = _LargestTensor()
        operands = self.tensor(grad), self.tensor(x), None, self.state(weight)
        with largest:
            self.run("cast_votes", *operands)
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
        self, rows: int, columns: int, threshold: int, leak: int, seed: int
    ) -> None:
        weight = self.weight(seed, rows, columns, 64)
        votes = np.random.default_rng(seed + 1).integers(-128, 128, (rows, columns)).astype(np.int8)
        state = self.state(weight, votes)
        flips = self.run("apply_votes", state, threshold, leak)
        trits, left, count = expected.apply_votes(weight.trits, votes, threshold, leak)
        np.testing.assert_array_equal(self.trits_out(weight.packed, weight.shape), trits)
        np.testing.assert_array_equal(self.votes_out(state.votes, weight.shape), left)
        assert int(flips) == count

    def test_from_minus_one_to_plus_one_takes_two_crossings(self) -> None:
        weight = self.weight_of(np.full((1, 32), -1, np.int8), np.zeros((1, 1), np.int8), 32)
        seen = []
        for _ in range(3):
            state = self.state(weight, np.full((1, 32), 127, np.int8))
            flips = self.run("apply_votes", state, 32, 0)
            seen.append((int(self.trits_out(weight.packed, weight.shape)[0, 0]), int(flips)))
            assert not self.votes_out(state.votes, weight.shape).any()
        assert seen == [(0, 32), (1, 32), (1, 0)]

    def test_below_the_threshold_nothing_changes_bit_for_bit(self) -> None:
        weight = self.weight(8, 9, 200, 64)
        votes = np.random.default_rng(1).integers(-31, 32, (9, 200)).astype(np.int8)
        packed = weight.packed.clone()
        state = self.state(weight, votes)
        flips = self.run("apply_votes", state, 32, 0)
        assert int(flips) == 0
        assert torch.equal(weight.packed, packed)
        np.testing.assert_array_equal(self.votes_out(state.votes, weight.shape), votes)

    def test_padding_never_flips(self) -> None:
        """After many crossings the packed form is still the one that packing the trits gives."""
        weight = self.weight(9, 3, 131, 32)
        self.run("apply_votes", self.state(weight, np.full((3, 131), 127, np.int8)), 1, 0)
        trits = self.trits_out(weight.packed, weight.shape)
        assert torch.equal(weight.packed, self.run("pack", self.tensor(trits)))

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
        self, rows: int, groups: int, threshold: int, band: int, leak: int, per_row: bool, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        origin = rng.integers(-9, 4, (rows, 1) if per_row else (1, 1)).astype(np.int8)
        exponent = (origin + rng.integers(-band, band + 1, (rows, groups))).astype(np.int8)
        votes = rng.integers(-128, 128, (rows, groups)).astype(np.int8)
        weight = self.weight_of(np.zeros((rows, 32 * groups), np.int8), exponent, 32)
        state = self.state(weight, exponent_votes=votes, origin=self.tensor(origin))
        moved = self.run("apply_exponent_votes", state, threshold, band, leak)
        wanted = expected.apply_exponent_votes(
            exponent, votes, np.broadcast_to(origin, exponent.shape), threshold, band, leak
        )
        np.testing.assert_array_equal(self.array(state.exponent), wanted[0])
        np.testing.assert_array_equal(self.array(state.learned), wanted[1])
        assert int(moved) == wanted[2]

    def test_an_exponent_stays_where_a_power_of_two_is_a_normal_float(self) -> None:
        weight = self.weight_of(np.zeros((1, 64), np.int8), np.array([[-126, 127]], np.int8), 32)
        state = self.state(weight, exponent_votes=np.array([[-128, 127]], np.int8))
        self.run("apply_exponent_votes", state, 1, 3, 0)
        assert self.array(state.exponent).tolist() == [[-126, 127]]

    # --- embedding_votes

    @pytest.mark.parametrize("kind", ["float32", "int8"])
    @pytest.mark.parametrize("correlated", [False, True])
    def test_a_lookup_votes_once_for_each_row_and_leaves_the_others_alone(
        self, kind: str, correlated: bool
    ) -> None:
        weight = self.weight(10, 11, 70, 32)
        ids = np.array([3, 0, 3, 7, 3])
        grad = self._integers(1, 5, 70, 4)
        # the sum over row 3 is -1: no single row decides
        grad[0] = 3
        grad[2] = -2
        grad[4] = -2
        votes = self._integers(2, 11, 70, 100).astype(np.int8)
        exponent_votes = self._integers(3, 11, 3, 100).astype(np.int8)
        correlation = self._integers(4, 11, 3, 30000).astype(np.int16)
        steps = np.abs(self._integers(5, 11, 3, 9)).astype(np.int32)
        state = self.state(weight, votes, exponent_votes)
        if correlated:
            state = state._replace(
                exponent_votes=None, correlation=self.tensor(correlation), steps=self.tensor(steps)
            )
        scale = None if kind == "float32" else self.tensor(float32(1.0))
        self.run("embedding_votes", self.tensor(ids), self.tensor(grad.astype(kind)), scale, state)
        summed = np.zeros((11, 70), np.int64)
        np.add.at(summed, ids, grad)
        wanted = expected.cast_votes(summed, weight.trits, votes, exponent_votes, 32)
        touched = np.isin(np.arange(11), ids)[:, None]
        np.testing.assert_array_equal(
            self.votes_out(state.votes, weight.shape), np.where(touched, wanted[0], votes)
        )
        if state.correlation is not None and state.steps is not None:
            score = expected.group_score(np.sign(summed) * weight.trits, 32)
            total = np.clip(correlation.astype(np.int64) + score, -(2**15), 2**15 - 1)
            np.testing.assert_array_equal(
                self.array(state.correlation), np.where(touched, total, correlation)
            )
            np.testing.assert_array_equal(self.array(state.steps), steps + touched)
        else:
            np.testing.assert_array_equal(
                self.array(state.learned), np.where(touched, wanted[1], exponent_votes)
            )
        squares = summed.astype(np.float64) ** 2
        np.testing.assert_array_equal(
            self.array(state.stats),
            np.concatenate([[0.0], squares.sum(axis=1), squares.sum(axis=0)]).astype(np.float32),
        )


class _LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the size of the largest tensor that any torch operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storages = {
            tensor.untyped_storage().data_ptr()
            for tensor in args
            if isinstance(tensor, torch.Tensor)
        }
        for value in result if isinstance(result, tuple | list) else (result,):
            if (
                isinstance(value, torch.Tensor)
                and value.untyped_storage().data_ptr() not in storages
            ):
                self.nbytes = max(self.nbytes, value.nbytes)
        return result
