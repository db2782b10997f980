from __future__ import annotations

import math

import numpy as np
import pytest

from arb_ternary_orchestrator.moments import Moments, weights


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99])
def test_mean_and_variance_are_unbiased(decay: float) -> None:
    values = np.random.default_rng(1).normal(3.0, 0.5, 400)
    moments = Moments(decay)
    assert math.isnan(moments.mean)
    for count, value in enumerate(values, start=1):
        moments.add(float(value))
        share = decay ** np.arange(count)[::-1]
        share /= share.sum()
        mean = share @ values[:count]
        assert moments.mean == pytest.approx(mean, rel=1e-12)
        if count == 1:
            assert moments.variance is None
            continue
        biased = share @ (values[:count] - mean) ** 2
        assert moments.variance == pytest.approx(biased / (1 - share @ share), rel=1e-9)


def test_variance_of_noise_is_right_on_average() -> None:
    draws = np.random.default_rng(2).normal(0.0, 2.0, (4000, 6))
    found = np.zeros((4000, 5))
    for row, values in enumerate(draws):
        moments = Moments(0.8)
        moments.add(float(values[0]))
        for column, value in enumerate(values[1:]):
            moments.add(float(value))
            found[row, column] = moments.variance
    # Four standard errors of the mean of 4,000; without the correction the second value alone would
    # give half of 4.
    assert np.all(np.abs(found.mean(0) - 4.0) < 4 * found.std(0) / math.sqrt(4000))


@pytest.mark.parametrize("count", [2, 3, 10, 300])
def test_degrees_of_freedom(count: int) -> None:
    share = 0.97 ** np.arange(count)
    share /= share.sum()
    form = np.diag(share) - np.outer(share, share)
    expected = np.trace(form) ** 2 / np.trace(form @ form)
    assert weights(0.97, count).degrees == pytest.approx(expected, rel=1e-9)
    assert weights(0.97, count).squares == pytest.approx((share**2).sum(), rel=1e-12)


def test_degrees_of_freedom_of_equal_weights() -> None:
    assert weights(1 - 1e-9, 12).degrees == pytest.approx(11, rel=1e-5)


def test_state_roundtrip() -> None:
    first = Moments(0.9)
    second = Moments(0.9)
    for value in (1.0, 2.5, 0.25):
        first.add(value)
    second.load_state_dict(first.state_dict())
    first.add(4.0)
    second.add(4.0)
    assert first.state_dict() == second.state_dict()
