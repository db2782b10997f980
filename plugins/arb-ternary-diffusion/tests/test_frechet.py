"""The Frechet distance against scipy and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import sqrtm

from arb_ternary.errors import DataError
from arb_ternary_diffusion.frechet import Moments, compute_moments, frechet_distance


def covariance(features: int, rank: int, seed: int) -> np.ndarray:
    factor = np.random.default_rng(seed).normal(size=(features, rank))
    return factor @ factor.T


@pytest.mark.parametrize("rank", [12, 3])
def test_distance_matches_scipys_square_root(rank: int) -> None:
    generator = np.random.default_rng(0)
    one = Moments(generator.normal(size=12), covariance(12, 12, 1))
    other = Moments(generator.normal(size=12), covariance(12, rank, 2))
    root = sqrtm(one.covariance @ other.covariance).real
    expected = ((one.mean - other.mean) ** 2).sum() + np.trace(
        one.covariance + other.covariance - 2 * root
    )
    assert frechet_distance(one, other) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(other, one) == pytest.approx(expected, rel=1e-6)


def test_distance_in_one_dimension() -> None:
    one = Moments(np.array([1.0]), np.array([[4.0]]))
    other = Moments(np.array([-2.0]), np.array([[0.25]]))
    assert frechet_distance(one, other) == pytest.approx(3.0**2 + (2.0 - 0.5) ** 2)


def test_distance_to_itself_is_zero() -> None:
    one = Moments(np.ones(8), covariance(8, 3, 3))
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-6)


def test_moments_match_numpy() -> None:
    samples = np.random.default_rng(5).normal(size=(40, 1, 2, 3)).astype(np.float32)
    found = compute_moments(samples)
    flat = samples.reshape(40, 6).astype(np.float64)
    centred = flat - flat.mean(0)
    np.testing.assert_allclose(found.mean, flat.sum(0) / 40)
    np.testing.assert_allclose(found.covariance, centred.T @ centred / 39)


def test_moments_refuse_unusable_samples() -> None:
    with pytest.raises(DataError, match="at least 2"):
        compute_moments(np.zeros((1, 4)))
    with pytest.raises(DataError, match="not finite"):
        compute_moments(np.array([[0.0], [np.nan]]))
