"""Backend suite, part 2: quantisation, both matrix products, lookup and the fused norm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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

#: Unit roundoff of bfloat16: eight bits of significand.
BFLOAT16_ROUNDOFF = 2.0**-8


class ProductTests(BackendCase):
    """Products and quantisation."""

    # --- quantize_rows

    @pytest.mark.parametrize("shape", [(1, 1), (3, 31), (4, 129), (17, 300), (0, 8)])
    @pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e20])
    def test_rows_are_quantised_as_in_numpy_bit_for_bit(
        self, shape: tuple[int, int], magnitude: float
    ) -> None:
        x = (np.random.default_rng(0).standard_normal(shape) * magnitude).astype(np.float32)
        q, scale = self.run("quantize_rows", self.tensor(x))
        assert (q.dtype, scale.dtype) == (torch.int8, torch.float32)
        wanted_q, wanted_scale = expected.quantize_rows(x)
        np.testing.assert_array_equal(self.array(scale), wanted_scale)
        np.testing.assert_array_equal(self.array(q), wanted_q)

    def test_a_tie_goes_to_the_even_integer(self) -> None:
        x = float32([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]])
        q, scale = self.run("quantize_rows", self.tensor(x))
        assert self.array(scale).tolist() == [1.0]
        assert self.array(q).tolist() == [[127, 0, 2, 2, 0, -2, -2, -127]]

    def test_a_row_of_zeros_gives_zeros_and_a_zero_scale(self) -> None:
        x = float32([[0.0, -0.0, 0.0], [1.0, 0.0, -1.0]])
        q, scale = self.run("quantize_rows", self.tensor(x))
        assert self.array(q).tolist() == [[0, 0, 0], [127, 0, -127]]
        assert self.array(scale)[0] == 0.0

    def test_bfloat16_rows_are_quantised_in_float32(self) -> None:
        x = self.tensor(
            np.random.default_rng(3).standard_normal((5, 67)).astype(np.float32), torch.bfloat16
        )
        q, scale = self.run("quantize_rows", x)
        wanted_q, wanted_scale = expected.quantize_rows(self.array(x))
        np.testing.assert_array_equal(self.array(scale), wanted_scale)
        np.testing.assert_array_equal(self.array(q), wanted_q)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    def test_a_row_that_is_not_finite_has_a_scale_that_is_not_finite(self, bad: float) -> None:
        _, scale = self.run(
            "quantize_rows", self.tensor(float32([[1.0, bad, 2.0], [1.0, 2.0, 3.0]]))
        )
        assert np.isfinite(self.array(scale)).tolist() == [False, True]

    # --- linear

    def _int8_input(self, seed: int, rows: int, columns: int) -> tuple[Array, Array]:
        rng = np.random.default_rng(seed)
        return (
            rng.integers(-127, 128, (rows, columns)).astype(np.int8),
            rng.uniform(0.001, 2.0, rows).astype(np.float32),
        )

    def _check_int8(
        self, weight: Weight, q: Array, scale: Array, bias: Array | None = None
    ) -> None:
        y = self.run(
            "linear",
            self.tensor(q),
            self.tensor(scale),
            weight.packed,
            weight.exponent_tensor,
            None if bias is None else self.tensor(bias),
            weight.shape,
            torch.float32,
        )
        assert y.dtype == torch.float32
        assert tuple(y.shape) == (len(q), weight.shape.out_features)
        wanted = expected.linear_int8(
            q, scale, weight.trits, weight.exponent, weight.shape.group_size, bias
        )
        np.testing.assert_array_equal(self.array(y), wanted)

    @pytest.mark.parametrize("group_size", GROUP_SIZES)
    @pytest.mark.parametrize("sizes", SHAPES)
    def test_int8_products_are_exact(self, sizes: tuple[int, int, int], group_size: int) -> None:
        rows, out_features, columns = sizes
        weight = self.weight(sum(sizes), out_features, columns, group_size)
        self._check_int8(weight, *self._int8_input(rows, rows, columns))

    @pytest.mark.parametrize(
        ("low", "high"), [(-9, -9), (-3, 1), (0, 3), (-30, -26), (-12, 0), (-20, 10)]
    )
    def test_int8_products_are_exact_for_every_spread_of_exponents(
        self, low: int, high: int
    ) -> None:
        weight = self.weight(5, 9, 300, 32, (low, high))
        self._check_int8(weight, *self._int8_input(6, 4, 300))

    @pytest.mark.parametrize("exponent", [-3, -1])
    def test_negative_exponents_are_fractions(self, exponent: int) -> None:
        weight = self.weight_of(np.ones((2, 32), np.int8), np.full((2, 1), exponent, np.int8), 32)
        ones = np.ones((1, 32), np.int8)
        y = self.run(
            "linear",
            self.tensor(ones),
            self.tensor(float32([1.0])),
            weight.packed,
            weight.exponent_tensor,
            None,
            weight.shape,
            torch.float32,
        )
        assert self.array(y).tolist() == [[32 * 2.0**exponent] * 2]

    @pytest.mark.parametrize("activation", [127, -127])
    @pytest.mark.parametrize("trit", [1, -1])
    @pytest.mark.parametrize("columns", [4096, 65536])
    def test_the_largest_sum_passes_through_no_16_bit_intermediate(
        self, columns: int, trit: int, activation: int
    ) -> None:
        weight = self.weight_of(
            np.full((3, columns), trit, np.int8), np.zeros((3, columns // 128), np.int8), 128
        )
        q = np.full((2, columns), activation, np.int8)
        y = self.run(
            "linear",
            self.tensor(q),
            self.tensor(np.ones(2, np.float32)),
            weight.packed,
            weight.exponent_tensor,
            None,
            weight.shape,
            torch.float32,
        )
        assert self.array(y).tolist() == [[float(trit * activation * columns)] * 3] * 2

    def test_a_bias_is_added_last(self) -> None:
        weight = self.weight(7, 11, 140, 64)
        bias = np.random.default_rng(8).standard_normal(11).astype(np.float32)
        self._check_int8(weight, *self._int8_input(9, 6, 140), bias)

    @examples(25)
    @given(
        rows=st.integers(0, 6),
        out_features=st.integers(1, 20),
        columns=st.integers(1, 280),
        group_size=st.sampled_from(GROUP_SIZES),
        seed=st.integers(0, 2**16),
    )
    def test_int8_products_of_ragged_shapes_are_exact(
        self, rows: int, out_features: int, columns: int, group_size: int, seed: int
    ) -> None:
        weight = self.weight(seed, out_features, columns, group_size, (-8, 2))
        self._check_int8(weight, *self._int8_input(seed, rows, columns))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("sizes", SHAPES)
    def test_float_products_stay_within_the_bound_of_a_dot_product(
        self, sizes: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        rows, out_features, columns = sizes
        weight = self.weight(3, out_features, columns, 32)
        x = self.tensor(
            np.random.default_rng(4).standard_normal((rows, columns)).astype(np.float32), dtype
        )
        arguments = (x, None, weight.packed, weight.exponent_tensor, None, weight.shape, dtype)
        y = self.run("linear", *arguments)
        assert y.dtype == dtype
        dense = expected.dense_weight(weight.trits, weight.exponent, weight.shape.group_size)
        self._within_bound(self.array(y), self.array(x).astype(np.float64), dense.T, dtype)

    def _within_bound(self, got: Array, left: Array, right: Array, dtype: torch.dtype) -> None:
        wanted = left @ right
        bound = expected.dot_product_bound(left.shape[1], np.abs(left) @ np.abs(right))
        if dtype == torch.bfloat16:
            bound = bound + BFLOAT16_ROUNDOFF * (np.abs(wanted) + bound)
        assert np.all(np.abs(got - wanted) <= bound), f"largest error {np.abs(got - wanted).max()}"

    def test_a_nan_stays_in_its_row(self) -> None:
        weight = self.weight(3, 6, 64, 32)
        x = np.ones((3, 64), np.float32)
        x[1, 5] = np.nan
        arguments = (weight.packed, weight.exponent_tensor, None, weight.shape, torch.float32)
        y = self.array(self.run("linear", self.tensor(x), None, *arguments))
        assert np.isnan(y[1]).all()
        assert np.isfinite(y[[0, 2]]).all()

    def test_activations_need_not_be_contiguous(self) -> None:
        weight = self.weight(3, 6, 64, 32)
        q, scale = self._int8_input(1, 64, 5)
        turned = self.tensor(q).t()
        y = self.run(
            "linear",
            turned,
            self.tensor(scale[:5]),
            weight.packed,
            weight.exponent_tensor,
            None,
            weight.shape,
            torch.float32,
        )
        wanted = expected.linear_int8(q.T, scale[:5], weight.trits, weight.exponent, 32)
        np.testing.assert_array_equal(self.array(y), wanted)

    def test_a_changed_weight_is_seen_by_the_next_product(self) -> None:
        """Whatever a backend keeps between calls, it notices that the weight or its exponents were
        rewritten.
        """
        weight = self.weight(1, 8, 128, 32)
        other = self.weight(2, 8, 128, 32)
        q, scale = self._int8_input(1, 3, 128)
        self._check_int8(weight, q, scale)
        weight.packed.copy_(other.packed)
        changed = Weight(
            other.trits, weight.exponent, weight.shape, weight.packed, weight.exponent_tensor
        )
        self._check_int8(changed, q, scale)
        weight.exponent_tensor.copy_(other.exponent_tensor)
        self._check_int8(
            Weight(
                other.trits, other.exponent, weight.shape, weight.packed, weight.exponent_tensor
            ),
            q,
            scale,
        )

    def test_results_and_inputs_survive_the_next_call(self) -> None:
        weight = self.weight(1, 8, 128, 32)
        q, scale = (self.tensor(array) for array in self._int8_input(1, 3, 128))
        inputs = (q, scale, weight.packed, weight.exponent_tensor)
        before = [tensor.clone() for tensor in inputs]
        first = self.run("linear", *inputs, None, weight.shape, torch.float32)
        kept = first.clone()
        self.run("linear", q.neg(), scale * 3, *inputs[2:], None, weight.shape, torch.float32)
        assert torch.equal(first, kept)
        assert all(torch.equal(*pair) for pair in zip(inputs, before, strict=True))

    # --- linear_grad_input

    @pytest.mark.parametrize("group_size", GROUP_SIZES)
    @pytest.mark.parametrize("sizes", SHAPES)
    def test_int8_gradients_of_the_input_are_exact(
        self, sizes: tuple[int, int, int], group_size: int
    ) -> None:
        rows, out_features, columns = sizes
        weight = self.weight(sum(sizes), out_features, columns, group_size, (-7, 1))
        q, _ = self._int8_input(2, rows, out_features)
        scale = 2.0**-11
        grad = self.run(
            "linear_grad_input",
            self.tensor(q),
            self.tensor(float32(scale)),
            weight.packed,
            weight.exponent_tensor,
            weight.shape,
            torch.float32,
        )
        assert tuple(grad.shape) == (rows, columns)
        wanted = expected.linear_int8_grad_input(
            q, scale, weight.trits, weight.exponent, weight.shape.group_size
        )
        np.testing.assert_array_equal(self.array(grad), wanted)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("sizes", SHAPES)
    def test_float_gradients_of_the_input_stay_within_the_bound_of_a_dot_product(
        self, sizes: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        rows, out_features, columns = sizes
        weight = self.weight(3, out_features, columns, 64)
        grad_y = self.tensor(
            np.random.default_rng(5).standard_normal((rows, out_features)).astype(np.float32), dtype
        )
        arguments = (grad_y, None, weight.packed, weight.exponent_tensor, weight.shape, dtype)
        grad = self.run("linear_grad_input", *arguments)
        assert grad.dtype == dtype
        dense = expected.dense_weight(weight.trits, weight.exponent, weight.shape.group_size)
        self._within_bound(self.array(grad), self.array(grad_y).astype(np.float64), dense, dtype)

    # --- optional ops

    @pytest.mark.parametrize("group_size", GROUP_SIZES)
    def test_a_lookup_returns_the_rows_exactly(self, group_size: int) -> None:
        weight = self.weight(9, 23, 133, group_size)
        ids = np.array([0, 22, 5, 5, 1])
        arguments = (weight.packed, weight.exponent_tensor, weight.shape, torch.float32)
        rows = self.run("embedding", self.tensor(ids), *arguments)
        dense = expected.dense_weight(weight.trits, weight.exponent, weight.shape.group_size)
        np.testing.assert_array_equal(self.array(rows), dense[ids].astype(np.float32))

    def test_the_fused_norm_quantises_the_normalised_row(self) -> None:
        x = np.random.default_rng(6).standard_normal((5, 96)).astype(np.float32)
        q, scale = self.run("rms_norm_quantize", self.tensor(x), 1e-6)
        wide = x.astype(np.float64)
        normal = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6)
        wanted_scale = np.abs(normal).max(axis=1) / 127
        # A mean of K squares, a square root, two divisions: K + 6 roundings of relative size u.
        tolerance = (96 + 6) * expected.FLOAT32_ROUNDOFF
        np.testing.assert_allclose(self.array(scale), wanted_scale, rtol=tolerance)
        quotient = normal / wanted_scale[:, None]
        assert np.all(np.abs(self.array(q) - quotient) <= 0.5 + 127 * 2 * tolerance)

    @pytest.mark.parametrize("magnitude", [1e-6, 1.0, 300.0])
    def test_gradients_are_rounded_by_the_counter_hash(self, magnitude: float) -> None:
        grad = (np.random.default_rng(7).standard_normal((4, 33)) * magnitude).astype(np.float32)
        grad[1, 1] = 0.0
        q, scale = self.run("quantize_gradient", self.tensor(grad), 11, (5 << 20) + 2, 12345)
        wanted_q, wanted_scale = expected.quantize_gradient(grad, 11, (5 << 20) + 2, 12345)
        assert float(scale) == wanted_scale
        np.testing.assert_array_equal(self.array(q), wanted_q)
