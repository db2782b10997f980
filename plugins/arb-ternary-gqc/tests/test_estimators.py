"""The estimators against closed forms and scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary_gqc.gns import GradientNoiseScale, mccandlish, norm_variance
from arb_ternary_gqc.mht import is_precise


@given(
    n=st.integers(2, 12),
    mean=st.lists(st.floats(-2, 2), min_size=3, max_size=3),
    spread=st.lists(st.floats(0.1, 3), min_size=3, max_size=3),
    seed=st.integers(0, 1000),
)
def test_estimates_equal_the_sample_moments(
    n: int, mean: list[float], spread: list[float], seed: int
) -> None:
    """Unbiased: ``S`` is the trace of the sample covariance, ``|G|^2 = |mean|^2 - S / n``."""
    draws = np.random.default_rng(seed).normal(mean, spread, size=(n, 3))
    trace = float(np.trace(np.cov(draws.T)))
    signal = float(draws.mean(0) @ draws.mean(0)) - trace / n
    found = mccandlish(
        [float(np.linalg.norm(g)) for g in draws], float(np.linalg.norm(draws.mean(0)))
    )
    if signal < 1e-6:
        assert found is None or found > 1e5 or signal > 0
    else:
        assert found == pytest.approx(trace / signal, rel=1e-6)


def test_noise_scale_converges_to_its_definition() -> None:
    mean = np.array([1.0, -2.0, 0.5])
    spread = np.array([0.5, 1.0, 2.0])
    expected = (spread**2).sum() / (mean**2).sum()
    rng = np.random.default_rng(0)
    draws = rng.normal(mean, spread, size=(200_000, 3))
    found = mccandlish(np.linalg.norm(draws, axis=1).tolist(), float(np.linalg.norm(draws.mean(0))))
    # The standard error of the trace is its relative 1 / sqrt(n), and smaller; six of them.
    assert found == pytest.approx(expected, rel=6 * 3 / math.sqrt(200_000))


def test_opposite_gradients_have_no_noise_scale() -> None:
    assert mccandlish([1.0, 1.0], 0.0) is None
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    wrapper = GradientNoiseScale(torch.optim.SGD([weight], lr=1.0), max_batch_draws=5)
    decisions = []
    for draw in range(5):
        (weight.sum() * (1.0 if draw % 2 else -1.0)).backward()
        decisions.append(wrapper.step())
    assert decisions == [False] * 4 + [True]


@pytest.mark.parametrize(("noise", "expected"), [(0.0, 2), (1.5, 3)])
def test_draws_until_the_noise_scale_is_covered(noise: float, expected: int) -> None:
    """Two of 1 + noise, 1 - noise and 1 have no positive signal if the noise is 1.5."""
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    wrapper = GradientNoiseScale(
        torch.optim.SGD([weight], lr=1.0), noise_multiplier=4.0, max_batch_draws=9
    )
    gradients = [1 + noise, 1 - noise, 1.0]
    draws = 0
    for gradient in gradients:
        (weight * gradient).backward()
        draws += 1
        if wrapper.step():
            break
    assert draws == expected
    assert wrapper.statistics()["last_num_draws"] == expected
    if noise:
        variance = noise * noise  # of 1 + noise, 1 - noise and 1, with n - 1 = 2 below
        assert wrapper.statistics()["estimated_gns"] == pytest.approx(variance / (1 - variance / 3))


def test_max_draws_with_the_estimator_that_needs_two() -> None:
    weight = torch.nn.Parameter(torch.zeros(()))
    for estimator, first in (("mccandlish", True), ("norm_variance", False)):
        wrapper = GradientNoiseScale(
            torch.optim.SGD([weight], lr=1.0), max_batch_draws=1, estimator=estimator
        )
        (weight * 1.0).backward()
        assert wrapper.step() is first
        if not first:
            (weight * 1.0).backward()
            assert wrapper.step()


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=30))
def test_norm_variance_equals_numpy(norms: list[float]) -> None:
    assert norm_variance(norms) == np.var(norms) / (np.mean(np.array(norms) ** 2) + 1e-8)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.98, 0.999])
def test_precision_of_three_samples_has_a_closed_form(confidence: float) -> None:
    """With two degrees of freedom, ``t = c sqrt(2 / (1 - c^2))`` (Abramowitz and Stegun 26.7.4)."""
    quantile = confidence * math.sqrt(2 / (1 - confidence**2))
    # Samples 9, 10 and 11 have the mean 10 and the standard error 1 / sqrt(3).
    reach = quantile / math.sqrt(3) / 10
    assert is_precise([10.0, 11.0], 9.0, confidence, reach * (1 + 1e-9))
    assert not is_precise([10.0, 11.0], 9.0, confidence, reach * (1 - 1e-9))


@given(
    metrics=st.lists(st.floats(-5, 5), min_size=2, max_size=40),
    running=st.floats(-5, 5),
    confidence=st.floats(0.1, 0.999),
    tolerance=st.floats(0.001, 2),
)
def test_precision_equals_the_interval_of_scipy(
    metrics: list[float], running: float, confidence: float, tolerance: float
) -> None:
    samples = np.array([running, *metrics])
    mean = samples.mean()
    if mean == 0:
        assert not is_precise(metrics, running, confidence, tolerance)
        return
    low, high = scipy.stats.t.interval(
        confidence, len(samples) - 1, loc=mean, scale=scipy.stats.sem(samples) + 1e-12
    )
    room = min(low - (mean - abs(mean) * tolerance), (mean + abs(mean) * tolerance) - high)
    if abs(room) > 1e-9 * abs(mean):
        assert is_precise(metrics, running, confidence, tolerance) == (room > 0)
