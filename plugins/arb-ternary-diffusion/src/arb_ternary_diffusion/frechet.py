"""The Frechet distance of two sets of samples, by torchmetrics.

It is the distance of Gaussians with their means and covariances, ``|m - n|**2 + Tr(C + D - 2 (C
D)**(1/2))`` (Heusel et al., GANs Trained by a Two Time-Scale Update Rule, 2017). For few samples it
is too large, by an amount that shrinks with their number: compare sets of equal size.
"""

from __future__ import annotations

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

from arb_ternary.errors import DataError


class _Given(nn.Module):
    """Takes the place of the network whose features torchmetrics would compute."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.num_features = features

    def forward(self, samples_NF: Tensor) -> Tensor:
        return samples_NF


def frechet_distance(one: ArrayLike, other: ArrayLike) -> float:
    """Return the squared distance of two sets ``[N, ...]``, in the square of the samples' unit.

    Each sample is flattened to ``F`` numbers. Covariances are divided by ``N - 1``.

    Raises:
        DataError: there are fewer than two samples, or one has a number that is not finite.
    """
    one_NF = _samples(one)
    distance = FrechetInceptionDistance(feature=_Given(one_NF.size(1)))
    distance.update(one_NF, real=True)
    distance.update(_samples(other), real=False)
    return float(distance.compute())


def _samples(samples: ArrayLike) -> Tensor:
    stacked = torch.as_tensor(samples, dtype=torch.float64)
    if len(stacked) < 2:
        raise DataError(
            f"Frechet distance: a covariance needs at least 2 samples, not {len(stacked)}"
        )
    if not stacked.isfinite().all():
        raise DataError("Frechet distance: a sample has a number that is not finite")
    return stacked.flatten(1)
