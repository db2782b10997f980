"""Backend suite, part 2: quantisation, both matrix products, lookup and the fused norm."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from arb_ternary_testing import restatement as expected
from arb_ternary_testing.backend_case import (
    GROUP_SIZES,
    BackendCase,
    Sizes,
    Weight,
    every_group_size,
    every_shape,
    examples,
    filled,
    normal,
    ones,
    random_trits,
)
from arb_ternary_testing.restatement import Array, float32, int8

#: Unit roundoff of bfloat16: eight bits of significand.
BFLOAT16_ROUNDOFF: Final = 2.0**-8
#: Smallest and largest exponent of the format.
EXPONENTS: Final = (-126, 127)
#: Widest spread of the exponents in one integer sum: ``127 * 2**16 * 2**40 < 2**63``.
WIDEST_SPREAD: Final = 40
_FLOAT_TYPES: Final = (torch.float32, torch.bfloat16)


def _int8_input(seed: int, rows: int, columns: int) -> tuple[Array, Array]:
    """Return random int8 activations ``[M, K]`` and their row scales ``[M]``."""
    rng = np.random.default_rng(seed)
    q = int8(rng.integers(-127, 128, (rows, columns)))
    scale = float32(rng.uniform(0.001, 2.0, rows))
    return q, scale


def _spread_exponents(seed: int, rows: int, groups: int, spread: int) -> Array:
    """Return exponents ``[N, J]`` that spread over ``spread`` in every row, from other floors."""
    rng = np.random.default_rng(seed)
    exponent = rng.integers(0, spread + 1, (rows, groups))
    exponent[:, 0] = 0
    exponent[:, -1] = spread
    floor = rng.integers(-60, 10, (rows, 1))
    return int8(exponent + floor)


def _assert_within_bound(got: Array, left: Array, right: Array, dtype: torch.dtype) -> None:
    """Assert that ``got`` is ``left @ right`` up to the rounding of dot products in any order."""
    wanted = left @ right
    absolute_sum = np.abs(left) @ np.abs(right)
    bound = expected.dot_product_bound(left.shape[1], absolute_sum)
    if dtype == torch.bfloat16:
        bound = bound + BFLOAT16_ROUNDOFF * (np.abs(wanted) + bound)
    error = np.abs(got - wanted)
    assert np.all(error <= bound), f"largest error {error.max()}"


def _assert_tensor(value: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Assert that a kernel returned a tensor of this type and shape."""
    assert isinstance(value, Tensor)
    assert value.dtype == dtype
    assert tuple(value.shape) == shape


class ProductTests(BackendCase):
    """Tests of quantisation, products and lookup."""

    def _linear(
        self,
        weight: Weight,
        x: Tensor,
        scale: Tensor | None,
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        y: Tensor = self.run(
            "linear",
            x,
            scale,
            weight.packed,
            weight.exponent_tensor,
            bias,
            weight.shape,
            dtype,
        )
        _assert_tensor(y, dtype, (len(x), weight.shape.out_features))
        return y

    def _grad_input(
        self,
        weight: Weight,
        grad: Tensor,
        scale: Tensor | None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        grad_x: Tensor = self.run(
            "linear_grad_input",
            grad,
            scale,
            weight.packed,
            weight.exponent_tensor,
            weight.shape,
            dtype,
        )
        _assert_tensor(grad_x, dtype, (len(grad), weight.shape.in_features))
        return grad_x

    # --- quantize_rows

    def _check_quantize_rows(self, x: Tensor) -> None:
        q, scale = self.run("quantize_rows", x)
        assert q.dtype == torch.int8
        assert scale.dtype == torch.float32
        wanted_q, wanted_scale = expected.quantize_rows(self.array(x))
        self.assert_equal(scale, wanted_scale)
        self.assert_equal(q, wanted_q)

    @pytest.mark.parametrize(
        "shape",
        [(1, 1), (3, 31), (4, 129), (17, 300), (0, 8)],
    )
    @pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e20])
    def test_quantize_rows_matches_numpy_bitwise(
        self,
        shape: tuple[int, int],
        magnitude: float,
    ) -> None:
        rng = np.random.default_rng(0)
        x = rng.standard_normal(shape) * magnitude
        self._check_quantize_rows(self.tensor(float32(x)))

    def test_quantize_rows_rounds_half_to_even(self) -> None:
        x = float32([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]])
        q, scale = self.run("quantize_rows", self.tensor(x))
        assert self.array(scale).tolist() == [1.0]
        self.assert_equal(q, [[127, 0, 2, 2, 0, -2, -2, -127]])

    def test_row_of_zeros_has_a_zero_scale(self) -> None:
        x = float32([[0.0, -0.0, 0.0], [1.0, 0.0, -1.0]])
        q, scale = self.run("quantize_rows", self.tensor(x))
        self.assert_equal(q, [[0, 0, 0], [127, 0, -127]])
        assert self.array(scale)[0] == 0.0

    def test_bfloat16_rows_are_quantised_in_float32(self) -> None:
        x = normal(3, 5, 67)
        self._check_quantize_rows(self.tensor(x, torch.bfloat16))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    def test_non_finite_row_has_a_non_finite_scale(self, bad: float) -> None:
        x = float32([[1.0, bad, 2.0], [1.0, 2.0, 3.0]])
        _, scale = self.run("quantize_rows", self.tensor(x))
        assert np.isfinite(self.array(scale)).tolist() == [False, True]

    # --- linear

    def _check_int8(
        self,
        weight: Weight,
        q: Array,
        scale: Array,
        bias: Array | None = None,
    ) -> None:
        bias_N = None if bias is None else self.tensor(bias)
        y = self._linear(weight, self.tensor(q), self.tensor(scale), bias_N)
        wanted = expected.linear_int8(
            q,
            scale,
            weight.trits,
            weight.exponent,
            weight.group_size,
            bias,
        )
        self.assert_equal(y, wanted)

    @every_group_size
    @every_shape
    def test_int8_products_are_exact(self, sizes: Sizes, group_size: int) -> None:
        rows, out_features, columns = sizes
        weight = self.weight(sum(sizes), out_features, columns, group_size)
        self._check_int8(weight, *_int8_input(rows, rows, columns))

    @pytest.mark.parametrize(
        ("low", "high"),
        [(-9, -9), (-3, 1), (0, 3), (-30, -26), (-12, 0), (-20, 10)],
    )
    def test_int8_products_are_exact_for_any_exponent_spread(self, low: int, high: int) -> None:
        weight = self.weight(5, 9, 300, 32, (low, high))
        self._check_int8(weight, *_int8_input(6, 4, 300))

    @pytest.mark.parametrize("exponent", [-3, -1])
    def test_negative_exponents_are_fractions(self, exponent: int) -> None:
        weight = self.weight_of(filled(1, 2, 32), filled(exponent, 2, 1), 32)
        q = self.tensor(filled(1, 1, 32))
        y = self._linear(weight, q, self.tensor(float32([1.0])))
        total = 32 * 2.0**exponent
        self.assert_equal(y, [[total, total]])

    @pytest.mark.parametrize("activation", [127, -127])
    @pytest.mark.parametrize("trit", [1, -1])
    @pytest.mark.parametrize("columns", [4096, 65536])
    def test_largest_sum_needs_more_than_16_bits(
        self,
        columns: int,
        trit: int,
        activation: int,
    ) -> None:
        trits = filled(trit, 3, columns)
        weight = self.weight_of(trits, filled(0, 3, columns // 128), 128)
        q = self.tensor(filled(activation, 2, columns))
        y = self._linear(weight, q, self.tensor(float32([1.0, 1.0])))
        total = float(trit * activation * columns)
        self.assert_equal(y, np.full((2, 3), total))

    def test_int8_products_are_exact_at_the_widest_spread(self) -> None:
        trits = random_trits(1, 9, 300)
        exponent = _spread_exponents(2, 9, 10, WIDEST_SPREAD)
        weight = self.weight_of(trits, exponent, 32)
        self._check_int8(weight, *_int8_input(6, 4, 300))

    def test_largest_sums_at_the_widest_spread_need_63_bits(self) -> None:
        columns = 65536
        exponent = filled(0, 1, columns // 256)
        exponent[:, 1:] = WIDEST_SPREAD
        weight = self.weight_of(filled(1, 1, columns), exponent, 256)
        q = np.concatenate([filled(127, 1, columns), filled(-127, 1, columns)])
        y = self._linear(weight, self.tensor(q), self.tensor(float32([1.0, 1.0])))
        total = float32(127 * (256 + (columns - 256) * 2**WIDEST_SPREAD))
        self.assert_equal(y, [[total], [-total]])

    def test_small_exponents_count_beside_large_ones_that_cancel(self) -> None:
        trits = filled(1, 2, 64)
        trits[:, 48:] = -1
        exponent = filled(0, 2, 2)
        exponent[:, 1] = WIDEST_SPREAD
        weight = self.weight_of(trits, exponent, 32)
        y = self._linear(weight, self.tensor(filled(1, 1, 64)), self.tensor(float32([1.0])))
        self.assert_equal(y, [[32.0, 32.0]])

    @pytest.mark.parametrize("spread", [WIDEST_SPREAD + 1, 60, EXPONENTS[1] - EXPONENTS[0]])
    def test_wider_spread_is_an_error(self, spread: int) -> None:
        """64 bits would not hold the sum, and a wrong number must not pass for it."""
        ends = int8(np.array([[EXPONENTS[0], EXPONENTS[0] + spread]]))
        weight = self.weight_of(filled(1, 1, 64), ends, 32)
        with pytest.raises(ValueError, match=f"{spread}.* {WIDEST_SPREAD}"):
            self._linear(weight, self.tensor(filled(1, 1, 64)), self.tensor(float32([1.0])))

        weight = self.weight_of(filled(1, 2, 32), ends.T, 32)
        with pytest.raises(ValueError, match=f"{spread}.* {WIDEST_SPREAD}"):
            self._grad_input(weight, self.tensor(filled(1, 1, 2)), self.scalar(1.0))

    def test_bias_is_added_last(self) -> None:
        weight = self.weight(7, 11, 140, 64)
        bias = normal(8, 1, 11)[0]
        self._check_int8(weight, *_int8_input(9, 6, 140), bias)

    @examples(25)
    @given(
        rows=st.integers(0, 6),
        out_features=st.integers(1, 20),
        columns=st.integers(1, 280),
        group_size=st.sampled_from(GROUP_SIZES),
        seed=st.integers(0, 2**16),
    )
    def test_int8_products_of_ragged_shapes_are_exact(
        self,
        rows: int,
        out_features: int,
        columns: int,
        group_size: int,
        seed: int,
    ) -> None:
        weight = self.weight(seed, out_features, columns, group_size, (-8, 2))
        self._check_int8(weight, *_int8_input(seed, rows, columns))

    @pytest.mark.parametrize("dtype", _FLOAT_TYPES)
    @every_shape
    def test_float_products_are_within_the_error_bound(
        self,
        sizes: Sizes,
        dtype: torch.dtype,
    ) -> None:
        rows, out_features, columns = sizes
        weight = self.weight(3, out_features, columns, 32)
        x = self.tensor(normal(4, rows, columns), dtype)
        y = self._linear(weight, x, None, dtype=dtype)
        wide = self.array(x).astype(np.float64)
        _assert_within_bound(self.array(y), wide, weight.dense.T, dtype)

    def test_float_products_take_every_exponent(self) -> None:
        trits = random_trits(3, 10, 320)
        exponent = np.linspace(*EXPONENTS, 10).round() + np.zeros((10, 1))
        weight = self.weight_of(trits, int8(exponent), 32)
        # Small factors: the sums stay below 2**128.
        x = normal(4, 4, 320) / 1000
        y = self._linear(weight, self.tensor(x), None)
        _assert_within_bound(self.array(y), x.astype(np.float64), weight.dense.T, torch.float32)

        weight = self.weight_of(trits, int8(exponent.T), 32)
        grad_y = normal(5, 4, 10) / 1000
        grad = self._grad_input(weight, self.tensor(grad_y), None)
        wide = grad_y.astype(np.float64)
        _assert_within_bound(self.array(grad), wide, weight.dense, torch.float32)

    def test_nan_stays_in_its_row(self) -> None:
        weight = self.weight(3, 6, 64, 32)
        x = ones(3, 64)
        x[1, 5] = np.nan
        product = self._linear(weight, self.tensor(x), None)
        y = self.array(product)
        assert np.isnan(y[1]).all()
        assert np.isfinite(y[[0, 2]]).all()

    def test_activations_need_not_be_contiguous(self) -> None:
        weight = self.weight(3, 6, 64, 32)
        q, scale = _int8_input(1, 64, 5)
        scale = scale[:5]
        transposed = self.tensor(q).t()
        y = self._linear(weight, transposed, self.tensor(scale))
        wanted = expected.linear_int8(
            q.T,
            scale,
            weight.trits,
            weight.exponent,
            weight.group_size,
        )
        self.assert_equal(y, wanted)

    def test_product_uses_a_weight_changed_in_place(self) -> None:
        """A backend that caches a weight must notice when the weight or its exponents change."""
        weight = self.weight(1, 8, 128, 32)
        other = self.weight(2, 8, 128, 32)
        q, scale = _int8_input(1, 3, 128)
        self._check_int8(weight, q, scale)

        weight.packed.copy_(other.packed)
        weight = evolve(weight, trits=other.trits)
        self._check_int8(weight, q, scale)

        weight.exponent_tensor.copy_(other.exponent_tensor)
        weight = evolve(weight, exponent=other.exponent)
        self._check_int8(weight, q, scale)

    def test_results_and_inputs_survive_the_next_call(self) -> None:
        weight = self.weight(1, 8, 128, 32)
        inputs = _int8_input(1, 3, 128)
        q, scale = map(self.tensor, inputs)
        with self.unchanged(q, scale, weight.packed, weight.exponent_tensor):
            first = self._linear(weight, q, scale)
            kept = first.clone()
            self._linear(weight, q.neg(), scale * 3)
        assert torch.equal(first, kept)

    # --- linear_grad_input

    @every_group_size
    @every_shape
    def test_int8_gradients_of_the_input_are_exact(self, sizes: Sizes, group_size: int) -> None:
        rows, out_features, columns = sizes
        weight = self.weight(sum(sizes), out_features, columns, group_size, (-7, 1))
        q, _ = _int8_input(2, rows, out_features)
        self._check_int8_grad_input(weight, q)

    def _check_int8_grad_input(self, weight: Weight, q: Array) -> None:
        scale = 2.0**-11
        grad = self._grad_input(weight, self.tensor(q), self.scalar(scale))
        wanted = expected.linear_int8_grad_input(
            q,
            scale,
            weight.trits,
            weight.exponent,
            weight.group_size,
        )
        self.assert_equal(grad, wanted)

    def test_int8_input_gradients_are_exact_at_the_widest_spread(self) -> None:
        trits = random_trits(1, 10, 300)
        exponent = _spread_exponents(2, 10, 10, WIDEST_SPREAD).T
        weight = self.weight_of(trits, exponent, 32)
        q, _ = _int8_input(6, 4, 10)
        self._check_int8_grad_input(weight, q)

    @pytest.mark.parametrize("dtype", _FLOAT_TYPES)
    @every_shape
    def test_float_input_gradients_are_within_the_error_bound(
        self,
        sizes: Sizes,
        dtype: torch.dtype,
    ) -> None:
        rows, out_features, columns = sizes
        weight = self.weight(3, out_features, columns, 64)
        grad_y = self.tensor(normal(5, rows, out_features), dtype)
        grad = self._grad_input(weight, grad_y, None, dtype)
        wide = self.array(grad_y).astype(np.float64)
        _assert_within_bound(self.array(grad), wide, weight.dense, dtype)

    # --- optional ops

    @every_group_size
    def test_lookup_returns_the_exact_rows(self, group_size: int) -> None:
        weight = self.weight(9, 23, 133, group_size, EXPONENTS)
        ids = np.array([0, 22, 5, 5, 1])
        rows = self.run(
            "embedding",
            self.tensor(ids),
            weight.packed,
            weight.exponent_tensor,
            weight.shape,
            torch.float32,
        )
        wanted = float32(weight.dense[ids])
        self.assert_equal(rows, wanted)

    def test_fused_norm_quantises_the_normalised_row(self) -> None:
        x = normal(6, 5, 96)
        q, scale = self.run("rms_norm_quantize", self.tensor(x), 1e-6)
        wide = x.astype(np.float64)
        mean_square = (wide**2).mean(axis=1, keepdims=True)
        normalised = wide / np.sqrt(mean_square + 1e-6)
        wanted_scale = np.abs(normalised).max(axis=1) / 127
        # A mean of K squares, a square root, two divisions: K + 6 roundings of relative size u.
        tolerance = (96 + 6) * expected.FLOAT32_ROUNDOFF
        np.testing.assert_allclose(self.array(scale), wanted_scale, rtol=tolerance)
        quotient = normalised / wanted_scale[:, None]
        error = np.abs(self.array(q) - quotient)
        largest_error = 0.5 + 127 * 2 * tolerance
        assert np.all(error <= largest_error)

    @pytest.mark.parametrize("magnitude", [1e-6, 1.0, 300.0])
    def test_gradients_are_rounded_by_the_counter_hash(self, magnitude: float) -> None:
        rng = np.random.default_rng(7)
        grad = float32(rng.standard_normal((4, 33)) * magnitude)
        grad[1, 1] = 0.0
        words = (11, (5 << 20) + 2, 12345)
        q, scale = self.run("quantize_gradient", self.tensor(grad), *words)
        wanted_q, wanted_scale = expected.quantize_gradient(grad, *words)
        assert float(scale) == wanted_scale
        self.assert_equal(q, wanted_q)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("scales", ["ordinary", "zero", "not finite"])
    def test_both_roundings_of_several_gradients(self, scales: str, dtype: torch.dtype) -> None:
        rng = np.random.default_rng(8)
        sizes = (130, 33, 5)
        grads = [torch.tensor(rng.standard_normal((9, size))).to(dtype) for size in sizes]
        row_scale = torch.tensor(float32(rng.uniform(0.001, 3, 9)))
        if scales == "zero":
            row_scale.zero_()
        if scales == "not finite":
            row_scale[3] = float("inf")
            grads[1][2, 2] = float("nan")
        words = [(11, (5 << 20) + 2, 12345 + each, 7 - each) for each in range(len(grads))]
        for count in (1, 2, 3):
            found = self.run(
                "quantize_several",
                [grad.to(self.device) for grad in grads[:count]],
                row_scale.to(self.device),
                words[:count],
            )
            for grad, word, pair in zip(grads, words, found, strict=False):
                seed, step, stream, folded_stream = word
                # torch rounds the product to the dtype of the gradient.
                folded = grad * row_scale.to(dtype)[:, None]
                wanted = expected.quantize_gradient(grad.float().numpy(), seed, step, stream)
                wanted_folded = expected.quantize_gradient(
                    folded.float().numpy(), seed, step, folded_stream
                )
                self.assert_equal(pair[0], wanted[0])
                self.assert_equal(pair[2], wanted_folded[0])
                assert (float(pair[1]), float(pair[3])) == (wanted[1], wanted_folded[1])
