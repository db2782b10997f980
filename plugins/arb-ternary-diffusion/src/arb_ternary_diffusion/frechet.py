"""The Frechet distance of two sets of samples.

It is the distance of Gaussians with their means and covariances, ``|m - n|**2 + Tr(C + D - 2 (C
D)**(1/2))`` (Heusel et al., GANs Trained by a Two Time-Scale Update Rule, 2017). For few samples it
is too large, by an amount that shrinks with their number: compare sets of equal size.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import ArrayLike, NDArray

from arb_ternary.errors import DataError


@frozen(eq=False)
class Moments:
    """Mean ``[F]`` and covariance ``[F, F]``, float64."""

    mean: NDArray[np.float64]
    covariance: NDArray[np.float64]


def compute_moments(samples: ArrayLike) -> Moments:
    """Compute the moments of ``samples [N, ...]``, each flattened to ``F`` numbers.

    The covariance is divided by ``N - 1``.

    Raises:
        DataError: there are fewer than two samples, or one has a number that is not finite.
    """
    flat = np.asarray(samples, dtype=np.float64)
    flat = flat.reshape(len(flat), -1)
    if len(flat) < 2:
        raise DataError(f"Frechet distance: a covariance needs at least 2 samples, not {len(flat)}")
    if not np.isfinite(flat).all():
        raise DataError("Frechet distance: a sample has a number that is not finite")
    return Moments(flat.mean(axis=0), np.atleast_2d(np.cov(flat, rowvar=False)))


def frechet_distance(one: Moments, other: Moments) -> float:
    """Return the squared distance, in the square of the samples' unit.

    ``Tr (C D)**(1/2)`` is computed from the symmetric matrix ``C**(1/2) D C**(1/2)``, which has the
    same eigenvalues. The result is therefore real, even if a covariance is singular.
    """
    values, vectors = np.linalg.eigh(one.covariance)
    root = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    shared = np.linalg.eigvalsh(root @ other.covariance @ root).clip(min=0)
    difference = one.mean - other.mean
    return float(
        difference @ difference
        + np.trace(one.covariance)
        + np.trace(other.covariance)
        - 2 * np.sqrt(shared).sum()
    )
