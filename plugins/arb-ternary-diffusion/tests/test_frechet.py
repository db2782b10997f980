"""The Frechet distance against scipy and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import sqrtm

from arb_ternary.errors import DataError
from arb_ternary_diffusion.frechet import frechet_distance


@pytest.mark.parametrize("rank", [12, 3])
def test_distance_matches_scipys_square_root(rank: int) -> None:
    generator = np.random.default_rng(0)
    one = generator.normal(size=(40, 12))
    other = generator.normal(size=(50, rank)) @ generator.normal(size=(rank, 12))
    covariances = [np.cov(samples.T) for samples in (one, other)]
    root = sqrtm(covariances[0] @ covariances[1]).real
    shift = one.mean(0) - other.mean(0)
    expected = shift @ shift + np.trace(covariances[0] + covariances[1] - 2 * root)
    assert frechet_distance(one, other) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(other, one) == pytest.approx(expected, rel=1e-6)


def test_distance_in_one_dimension() -> None:
    one = np.array([[-1.0], [3.0]])  # mean 1, variance 8
    other = np.array([[-3.0], [-1.0]])  # mean -2, variance 2
    assert frechet_distance(one, other) == pytest.approx(3.0**2 + (8**0.5 - 2**0.5) ** 2)


def test_distance_to_itself_is_zero() -> None:
    samples = np.random.default_rng(3).normal(size=(20, 2, 4)).astype(np.float32)
    assert frechet_distance(samples, samples) == pytest.approx(0, abs=1e-6)


def test_unusable_samples_are_refused() -> None:
    with pytest.raises(DataError, match="at least 2"):
        frechet_distance(np.zeros((1, 4)), np.zeros((2, 4)))
    with pytest.raises(DataError, match="not finite"):
        frechet_distance(np.zeros((2, 1)), np.array([[0.0], [np.nan]]))
