"""Kernels of the torch backend against numpy re-statements in exact integers and float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arb_ternary.backends import integer, reference
from arb_ternary.backends import reference_votes as rv
from arb_ternary.backends.integer import int_matmul, shifted_weight_product
from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.vote_state import VoteState, new_state

GROUPS = st.sampled_from([32, 64, 128, 256, "row"])


def weight_shape(n: int, k: int, group: int | str) -> WeightShape:
    return WeightShape(n, k, max(k, 1) if group == "row" else int(group))


def random_weight(
    rng: np.random.Generator, shape: WeightShape, low: int = -9, spread: int = 4
) -> tuple[np.ndarray, np.ndarray]:
    trits = rng.integers(-1, 2, (shape.out_features, shape.in_features), dtype=np.int8)
    exponent = rng.integers(
        low, low + spread + 1, (shape.out_features, shape.groups), dtype=np.int8
    )
    return trits, exponent


def spread(exponent: np.ndarray, shape: WeightShape) -> np.ndarray:
    return np.repeat(exponent.astype(np.int64), shape.group_size, axis=1)[:, : shape.in_features]


def packed_of(trits: np.ndarray) -> torch.Tensor:
    return reference.pack(torch.from_numpy(trits))


# --- quantisation


@given(st.integers(0, 5), st.integers(1, 40), st.floats(1e-20, 1e20), st.integers(0, 2**32 - 1))
def test_quantised_rows_equal_the_formula(m: int, k: int, scale: float, seed: int) -> None:
    x = (np.random.default_rng(seed).standard_normal((m, k)) * scale).astype(np.float32)
    q, s = reference.quantize_rows(torch.from_numpy(x))
    expected_s = (
        (np.abs(x).max(axis=1) / np.float32(127)).astype(np.float32)
        if m
        else np.zeros(0, np.float32)
    )
    assert np.array_equal(s.numpy(), expected_s)
    assert np.array_equal(q.numpy(), np.rint(x / expected_s[:, None]).astype(np.int8))


def test_halves_round_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert reference.quantize_rows(x)[0].tolist() == [[127, 0, 2, 2, 0, -2]]


@pytest.mark.parametrize("tiny", [0.0, 1e-45])
def test_a_row_without_magnitude_gives_zeros(tiny: float) -> None:
    q, s = reference.quantize_rows(torch.tensor([[tiny, -tiny], [1.0, 0.0]]))
    assert q.tolist() == [[0, 0], [127, 0]]
    assert float(s[0]) == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_entry_reaches_the_scale(bad: float) -> None:
    _, s = reference.quantize_rows(torch.tensor([[1.0, bad]]))
    assert not torch.isfinite(s).any()


def test_normalised_rows_have_the_root_mean_square_removed_first() -> None:
    x = np.random.default_rng(0).standard_normal((4, 24)).astype(np.float32)
    q, s = reference.rms_norm_quantize(torch.from_numpy(x), 1e-6)
    y = x.astype(np.float64) / np.sqrt(
        (x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-6
    )
    np.testing.assert_allclose(s.numpy(), np.abs(y).max(axis=1) / 127, rtol=1e-6)
    assert np.abs(q.numpy() - y / s.numpy()[:, None]).max() <= 0.5 + 1e-4


# --- products


@given(
    st.integers(0, 6),
    st.integers(0, 9),
    st.integers(0, 300),
    GROUPS,
    st.integers(0, 8),
    st.integers(0, 2**32 - 1),
)
def test_the_int8_forward_is_the_exact_integer_sum(
    m: int, n: int, k: int, group: int | str, width: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = weight_shape(n, k, group)
    trits, exponent = random_weight(rng, shape, spread=width)
    q = rng.integers(-127, 128, (m, k), dtype=np.int8)
    scale = rng.random(m, dtype=np.float32)
    y = reference.linear(
        torch.from_numpy(q),
        torch.from_numpy(scale),
        packed_of(trits),
        torch.from_numpy(exponent),
        None,
        shape,
        torch.float32,
    )
    floor = exponent.astype(np.int64).min(axis=1) if k else np.zeros(n, np.int64)
    shifted = trits.astype(np.int64) << (spread(exponent, shape) - floor[:, None])
    acc = q.astype(np.int64) @ shifted.T
    expected = (acc.astype(np.float32) * scale[:, None]) * np.exp2(floor.astype(np.float32))
    assert np.array_equal(y.numpy(), expected)


@pytest.mark.parametrize("activation", [127, -127])
@pytest.mark.parametrize("spread_of_exponents", [0, 4])
def test_all_ones_at_65536_features_sum_exactly(activation: int, spread_of_exponents: int) -> None:
    k = 2**16
    shape = weight_shape(3, k, 128)
    exponent = torch.full((3, shape.groups), -7, dtype=torch.int8)
    exponent[:, 1::2] += spread_of_exponents
    q = torch.full((2, k), activation, dtype=torch.int8)
    packed = reference.pack(torch.ones(3, k, dtype=torch.int8))
    y = reference.linear(q, torch.ones(2), packed, exponent, None, shape, torch.float64)
    expected = activation * (k // 2) * (1 + 2**spread_of_exponents) * 2.0**-7
    assert y.tolist() == [[expected] * 3] * 2


def test_the_product_that_overflows_16_bits_is_right() -> None:
    # All weights +1, x = 127, K = 4096: 520,192. A 16-bit accumulator wraps.
    shape = weight_shape(1, 4096, "row")
    exponent = torch.zeros(1, 1, dtype=torch.int8)
    q = torch.full((1, 4096), 127, dtype=torch.int8)
    y = reference.linear(
        q,
        torch.ones(1),
        reference.pack(torch.ones(1, 4096, dtype=torch.int8)),
        exponent,
        None,
        shape,
        torch.float32,
    )
    assert float(y) == 127 * 4096


@given(
    st.integers(0, 6),
    st.integers(1, 9),
    st.integers(1, 200),
    GROUPS,
    st.integers(0, 12),
    st.integers(0, 2**32 - 1),
)
def test_the_int8_input_gradient_is_the_exact_integer_sum(
    m: int, n: int, k: int, group: int | str, width: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = weight_shape(n, k, group)
    trits, exponent = random_weight(rng, shape, spread=width)
    g = rng.integers(-127, 128, (m, n), dtype=np.int8)
    got = reference.linear_grad_input(
        torch.from_numpy(g),
        torch.tensor(0.25),
        packed_of(trits),
        torch.from_numpy(exponent),
        shape,
        torch.float32,
    )
    floor = spread(exponent.min(axis=0, keepdims=True), shape)
    acc = g.astype(np.int64) @ (trits.astype(np.int64) << (spread(exponent, shape) - floor))
    assert np.array_equal(
        got.numpy(), acc.astype(np.float32) * np.float32(0.25) * np.exp2(floor.astype(np.float32))
    )


@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 150), GROUPS, st.integers(0, 2**32 - 1))
def test_float_products_stay_within_the_error_of_a_dot_product(
    m: int, n: int, k: int, group: int | str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = weight_shape(n, k, group)
    trits, exponent = random_weight(rng, shape)
    weight = trits * np.exp2(spread(exponent, shape).astype(np.float64))
    x = rng.standard_normal((m, k)).astype(np.float32)
    y = reference.linear(
        torch.from_numpy(x),
        None,
        packed_of(trits),
        torch.from_numpy(exponent),
        None,
        shape,
        torch.float32,
    )
    # Higham: |error| <= gamma_K * |x| . |w| with gamma_K = K u / (1 - K u), u = 2**-24.
    unit = 2.0**-24
    bound = k * unit / (1 - k * unit) * (np.abs(x).astype(np.float64) @ np.abs(weight).T)
    assert (np.abs(y.numpy() - x.astype(np.float64) @ weight.T) <= bound + 1e-300).all()
    g = rng.standard_normal((m, n)).astype(np.float32)
    got = reference.linear_grad_input(
        torch.from_numpy(g),
        None,
        packed_of(trits),
        torch.from_numpy(exponent),
        shape,
        torch.float32,
    )
    bound = n * unit / (1 - n * unit) * (np.abs(g).astype(np.float64) @ np.abs(weight))
    assert (np.abs(got.numpy() - g.astype(np.float64) @ weight) <= bound + 1e-300).all()


@pytest.mark.parametrize("largest", [0, 6, 7, 13, 20, 40])
def test_shifted_products_are_exact_for_every_width_of_exponents(largest: int) -> None:
    rng = np.random.default_rng(largest)
    a = rng.integers(-127, 128, (5, 70), dtype=np.int8)
    t = rng.integers(-1, 2, (70, 6), dtype=np.int8)
    shift = rng.integers(0, largest + 1, (70, 6))
    shift[0, 0] = largest
    got = shifted_weight_product(torch.from_numpy(a), torch.from_numpy(t), torch.from_numpy(shift))
    expected = a.astype(object) @ (t.astype(object) << shift.astype(object))
    assert got.tolist() == expected.tolist()


def test_exponents_that_spread_too_far_for_64_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="spread over 41"):
        shifted_weight_product(
            torch.ones(1, 2, dtype=torch.int8),
            torch.ones(2, 1, dtype=torch.int8),
            torch.tensor([[0], [41]]),
        )


def test_a_library_that_saturates_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    integer._library_is_exact.cache_clear()
    exact = torch._int_mm

    def saturating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return exact(a, b).clamp(-(2**15), 2**15 - 1)

    monkeypatch.setattr(torch, "_int_mm", saturating)
    try:
        a = torch.full((2, 3000), 127, dtype=torch.int8)
        assert int_matmul(a, a.t().contiguous()).tolist() == [[127 * 127 * 3000] * 2] * 2
    finally:
        integer._library_is_exact.cache_clear()


def test_long_inner_dimensions_leave_32_bits() -> None:
    k = 140_000
    a = torch.full((1, k), 127, dtype=torch.int8)
    assert int(int_matmul(a, a.t().contiguous())) == 127 * 127 * k


# --- gradients to int8


@given(st.integers(1, 6), st.integers(1, 30), st.floats(1e-25, 1e25), st.integers(0, 2**32 - 1))
def test_the_gradient_scale_is_the_smallest_power_of_two(
    m: int, n: int, size: float, seed: int
) -> None:
    g = (np.random.default_rng(seed).standard_normal((m, n)) * size).astype(np.float32)
    q, scale = rv.quantize_gradient(torch.from_numpy(g), 1, 2, 3)
    largest = float(np.abs(g).max())
    assert np.log2(float(scale)) == int(np.log2(float(scale)))
    if float(scale) > 2.0**-126:
        assert largest <= 127 * float(scale)
        assert largest > 127 * float(scale) / 2
    assert (
        np.abs(q.numpy().astype(np.float64) - g.astype(np.float64) / float(scale)) <= 1 + 1e-6
    ).all()


def test_the_quantised_gradient_is_unbiased() -> None:
    g = torch.full((1, 400_000), 0.3)
    g[0, 0] = 127.0
    q, scale = rv.quantize_gradient(g, 7, 0, 0)
    assert float(scale) == 1.0
    mean = float(q[0, 1:].double().mean())
    assert abs(mean - 0.3) < 5 * (0.3 * 0.7 / 400_000) ** 0.5


@pytest.mark.parametrize("bad", [float("inf"), -float("inf")])
def test_a_gradient_without_finite_maximum_casts_nothing(bad: float) -> None:
    q, scale = rv.quantize_gradient(torch.tensor([[1.0, bad]]), 0, 0, 0)
    assert q.tolist() == [[0, 0]]
    assert float(scale) == 1.0


# --- votes


def cast(
    g_MN: np.ndarray,
    x: np.ndarray,
    trits: np.ndarray,
    votes: np.ndarray,
    ev: np.ndarray,
    shape: WeightShape,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    state = state_of(
        trits, np.zeros(ev.shape, np.int8), votes, shape, exponent_votes=torch.from_numpy(ev.copy())
    )
    unit = None if scale is None else torch.tensor(scale)
    rv.cast_votes(torch.from_numpy(g_MN), torch.from_numpy(x), unit, state)
    return state.votes.numpy(), state.learned.numpy(), state.stats.numpy()


def state_of(
    trits: np.ndarray,
    exponent: np.ndarray,
    votes: np.ndarray,
    shape: WeightShape,
    **others: torch.Tensor | None,
) -> VoteState:
    e = torch.from_numpy(exponent.copy())
    a = torch.from_numpy(votes.copy())
    return new_state(shape, packed_of(trits), e, a, "torch", **others)


def restated_votes(
    g: np.ndarray, trits: np.ndarray, votes: np.ndarray, ev: np.ndarray, shape: WeightShape
) -> tuple[np.ndarray, np.ndarray]:
    s = np.sign(g).astype(np.int64)
    a = np.clip(votes.astype(np.int64) - s, -128, 127)
    product = s * trits
    score = np.stack(
        [
            product[:, j * shape.group_size : (j + 1) * shape.group_size].sum(axis=1)
            for j in range(shape.groups)
        ],
        axis=1,
    )
    return a, np.clip(ev.astype(np.int64) - np.sign(score), -128, 127)


@given(st.integers(1, 7), st.integers(1, 9), st.integers(1, 160), GROUPS, st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_integer_votes_equal_the_rule(m: int, n: int, k: int, group: int | str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = weight_shape(n, k, group)
    trits, _ = random_weight(rng, shape)
    votes = rng.integers(-128, 128, (n, k), dtype=np.int8)
    ev = rng.integers(-128, 128, (n, shape.groups), dtype=np.int8)
    g = rng.integers(-3, 4, (m, n), dtype=np.int8)
    x = rng.integers(-3, 4, (m, k), dtype=np.int8)
    a, b, stats = cast(g, x, trits, votes, ev, shape, scale=0.5)
    gradient = g.astype(np.int64).T @ x.astype(np.int64)
    expected_a, expected_b = restated_votes(gradient, trits, votes, ev, shape)
    assert np.array_equal(a, expected_a)
    assert np.array_equal(b, expected_b)
    np.testing.assert_allclose(
        stats[1 : 1 + n], (0.5 * gradient).astype(float).__pow__(2).sum(axis=1), rtol=1e-5
    )
    np.testing.assert_allclose(
        stats[1 + n :], (0.5 * gradient).astype(float).__pow__(2).sum(axis=0), rtol=1e-5
    )


def test_votes_saturate_at_both_ends() -> None:
    shape = weight_shape(1, 2, "row")
    g = np.array([[1.0]], np.float32)
    x = np.array([[1.0, -1.0]], np.float32)
    a, _, _ = cast(
        g,
        x,
        np.zeros((1, 2), np.int8),
        np.array([[-128, 127]], np.int8),
        np.zeros((1, 1), np.int8),
        shape,
    )
    assert a.tolist() == [[-128, 127]]


def test_nan_gradients_cast_no_vote_and_are_counted() -> None:
    shape = weight_shape(2, 1, "row")
    g = np.array([[np.nan, 1.0]], np.float32)
    a, _, stats = cast(
        g,
        np.ones((1, 1), np.float32),
        np.ones((2, 1), np.int8),
        np.zeros((2, 1), np.int8),
        np.zeros((2, 1), np.int8),
        shape,
    )
    assert a.tolist() == [[0], [-1]]
    assert stats[0] == 1


def test_tiles_do_not_change_the_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    shape = weight_shape(10, 40, 32)
    trits, _ = random_weight(rng, shape)
    args = (
        rng.integers(-9, 9, (4, 10), dtype=np.int8),
        rng.integers(-9, 9, (4, 40), dtype=np.int8),
        trits,
        np.zeros((10, 40), np.int8),
        np.zeros((10, 2), np.int8),
        shape,
    )
    whole = cast(*args, scale=1.0)
    monkeypatch.setattr(rv, "_TILE", 120)
    for one, other in zip(whole, cast(*args, scale=1.0), strict=True):
        assert np.array_equal(one, other)


@given(
    st.integers(1, 5),
    st.integers(1, 140),
    st.integers(1, 127),
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
)
def test_flips_equal_the_rule_and_move_one_step_at_most(
    n: int, k: int, theta: int, leak: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = weight_shape(n, k, "row")
    trits, _ = random_weight(rng, shape)
    votes = rng.integers(-128, 128, (n, k), dtype=np.int8)
    state = state_of(trits, np.zeros((n, 1), np.int8), votes, shape)
    flips = rv.apply_votes(state, theta, leak)
    f = (votes >= theta).astype(int) - (votes <= -theta).astype(int)
    after = np.clip(trits + f, -1, 1)
    rest = np.where(f != 0, 0, votes.astype(int))
    rest = np.sign(rest) * np.maximum(np.abs(rest) - leak, 0)
    got = reference.unpack(state.weight, shape).numpy()
    assert np.array_equal(got, after)
    assert np.abs(got.astype(int) - trits).max() <= 1
    assert np.array_equal(state.votes.numpy(), rest)
    assert int(flips) == int((after != trits).sum())


@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 127),
    st.integers(0, 4),
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
)
def test_exponents_move_one_step_within_their_band(
    n: int, j: int, theta: int, band: int, leak: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    origin = rng.integers(-20, 20, (n, j), dtype=np.int8)
    exponent = (origin + rng.integers(-band, band + 1, (n, j))).astype(np.int8)
    votes = rng.integers(-128, 128, (n, j), dtype=np.int8)
    state = exponents_of(exponent, votes, torch.from_numpy(origin))
    moved = rv.apply_exponent_votes(state, theta, band, leak)
    up = (votes >= theta).astype(int) - (votes <= -theta).astype(int)
    expected = np.clip(exponent + up, origin.astype(int) - band, origin.astype(int) + band)
    rest = votes.astype(int) - theta * up
    rest = np.sign(rest) * np.maximum(np.abs(rest) - leak, 0)
    assert np.array_equal(state.exponent.numpy(), expected)
    assert np.array_equal(state.learned.numpy(), rest)
    assert int(moved) == int((expected != exponent).sum())


def test_exponents_stay_where_powers_of_two_are_normal_floats() -> None:
    state = exponents_of(np.array([[-126]], np.int8), np.array([[-127]], np.int8))
    rv.apply_exponent_votes(state, 1, 5, 0)
    assert state.exponent.tolist() == [[-126]]


def exponents_of(
    exponent: np.ndarray, votes: np.ndarray, origin: torch.Tensor | None = None
) -> VoteState:
    """A state of weights that are all 0, in groups of 32."""
    rows, groups = exponent.shape
    zeros = np.zeros((rows, 32 * groups), np.int8)
    shape = weight_shape(rows, 32 * groups, 32)
    made = state_of(zeros, exponent, zeros, shape, exponent_votes=torch.from_numpy(votes.copy()))
    return made if origin is None else made._replace(origin=origin)


def test_embedding_votes_sum_duplicates_before_the_sign() -> None:
    shape = weight_shape(4, 2, "row")
    trits = np.array([[1, -1], [1, 1], [0, 1], [1, 0]], np.int8)
    state = state_of(trits, np.zeros((4, 1), np.int8), np.zeros((4, 2), np.int8), shape)
    ids = torch.tensor([2, 0, 2])
    grad = torch.tensor([[3.0, -1.0], [-1.0, 5.0], [-4.0, -1.0]])
    rv.embedding_votes(ids, grad, None, state)
    # Row 2: 3 - 4 = -1 and -2 vote up. Row 0: -1 votes up, 5 down; its score is -2: the exponent
    # up.
    assert state.votes.tolist() == [[1, -1], [0, 0], [1, 1], [0, 0]]
    assert state.learned.tolist() == [[1], [0], [1], [0]]
    assert state.stats[1:5].tolist() == [26.0, 0.0, 5.0, 0.0]


def test_the_correlation_counts_with_saturation() -> None:
    shape = weight_shape(2, 2, "row")
    correlation = torch.tensor([[2**15 - 2], [0]], dtype=torch.int16)
    steps = torch.tensor([[2**31 - 1], [0]], dtype=torch.int32)
    ones = np.ones((2, 2), np.int8)
    zeros = np.zeros((2, 2), np.int8)
    state = state_of(
        ones, zeros[:, :1], zeros, shape, exponent_votes=None, correlation=correlation, steps=steps
    )
    rv.embedding_votes(torch.tensor([0, 1]), torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), None, state)
    assert correlation.tolist() == [[2**15 - 1], [-2]]
    assert steps.tolist() == [[2**31 - 1], [1]]
