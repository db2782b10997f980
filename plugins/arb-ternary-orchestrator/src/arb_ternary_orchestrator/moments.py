"""Exponentially weighted mean and variance, without the bias of the first steps."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import ClassVar

from attrs import frozen

from arb_ternary_orchestrator.state import Stateful


@frozen
class Weights:
    """Properties of weights ``decay**age`` that sum to 1; they do not depend on the values.

    Attributes:
        newest: the largest weight, that of the newest value.
        squares: sum of the squared weights. The mean of independent values has this share of the
            variance of one value, and the weighted mean square deviation is too small by the factor
            ``1 - squares``.
        degrees: degrees of freedom of the variance: those of the chi-square distribution with its
            mean and variance on Gaussian values (Satterthwaite 1946). It is ``count - 1`` if all
            weights are equal, and 0 for one value.
    """

    newest: float
    squares: float
    degrees: float


@lru_cache(maxsize=16_384)
def weights(decay: float, count: int) -> Weights:
    """Return the sums over ``count`` weights; ``0 < decay < 1`` and ``count >= 1``."""
    if count == 1:
        return Weights(1.0, 1.0, 0.0)
    newest = (1 - decay) / (1 - decay**count)
    squares = newest**2 * (1 - decay ** (2 * count)) / (1 - decay**2)
    cubes = newest**3 * (1 - decay ** (3 * count)) / (1 - decay**3)
    return Weights(newest, squares, (1 - squares) ** 2 / (squares - 2 * cubes + squares**2))


class Moments(Stateful):
    """Mean and variance of a sequence in which a value of age ``a`` weighs ``decay**a``.

    Both are free of bias from the first value on, for independent values of one distribution: the
    mean is divided by the sum of the weights, and the variance also by ``1 - squares``.

    Args:
        decay: decay of the weights, between 0 and 1.

    Attributes:
        count: number of values so far.
        mean: their weighted mean; ``nan`` before the first.
    """

    state_names: ClassVar[tuple[str, ...]] = ("count", "mean", "_spread")

    def __init__(self, decay: float) -> None:
        self.decay = decay
        # With more values the sums are, in double precision, those of infinitely many weights.
        self._enough = math.ceil(-38 / math.log(decay))
        self.count = 0
        self.mean = math.nan
        self._spread = 0.0

    @property
    def weights(self) -> Weights:
        """The weights of the values so far, at least one."""
        return weights(self.decay, min(self.count, self._enough))

    @property
    def variance(self) -> float | None:
        """Weighted variance; None before the second value."""
        return self._spread / (1 - self.weights.squares) if self.count > 1 else None

    def add(self, value: float) -> None:
        """Add a value, which must be finite."""
        self.count += 1
        if self.count == 1:
            self.mean = value
            return
        share = self.weights.newest
        distance = value - self.mean
        self.mean += share * distance
        # West 1979, with weights that sum to 1.
        self._spread = (1 - share) * (self._spread + share * distance * distance)
