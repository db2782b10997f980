"""Detection of spikes in a noisy sequence."""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from typing import ClassVar, Final

from scipy.special import stdtrit

from arb_ternary_orchestrator.moments import Moments
from arb_ternary_orchestrator.state import Stateful

#: Noise below this fraction of the mean is taken to be this large: it is rounding.
_ROUNDING: Final = 1e-6
#: Factor by which a spike fades in the score per value.
_FADING: Final = 0.9


class SpikeDetector(Stateful):
    """Detects values that are too high to be noise, and keeps them out of its statistics.

    A value is a spike if it exceeds the mean of the values before it by more than ``k`` standard
    deviations; both are exponentially weighted and free of bias. They are uncertain after few
    values, so the limit is then higher: the quantile of Student's t distribution that a new
    Gaussian value exceeds as often as a Gaussian variable exceeds ``k`` standard deviations, 0.135
    % for ``k = 3``. After many values (about 500 for a decay of 0.99) it is ``3.05`` standard
    deviations.

    A value above the limit enters the statistics as the limit, which widens them by a few percent:
    a single spike hardly moves the limit, and a level that has risen for good becomes the usual
    one after a while. What this clipping takes off the noise itself is negligible from ``k = 3``
    on; for ``k = 2`` 2.6 % of the noise are called spikes, not 2.3 %.

    Args:
        k: standard deviations, above 0.
        decay: factor by which the weight of a value falls with each value after it.
        warmup: number of first values that are not called spikes, because a run begins with its
            steepest fall. They are clipped like all others.
        memory: how far back :meth:`count` can look, in values.

    Attributes:
        seen: number of values so far, including those that are not finite.
        baseline: mean of the values before the last one; None if there were fewer than ``warmup``.
        limit: what the last value had to exceed to be a spike; infinite if there were fewer than
            two before it.
        score: sum of ``0.9**age`` over all spikes, ages in values.
    """

    state_names: ClassVar[tuple[str, ...]] = (
        "_moments",
        "seen",
        "baseline",
        "limit",
        "score",
        "_spikes",
    )

    def __init__(
        self, k: float = 3.0, decay: float = 0.99, *, warmup: int = 10, memory: int = 1000
    ) -> None:
        self.k = k
        self.warmup = warmup
        self.memory = memory
        self._tail = 0.5 * math.erfc(k / math.sqrt(2))
        self._moments = Moments(decay)
        self.seen = 0
        self.baseline: float | None = None
        self.limit = math.inf
        self.score = 0.0
        self._spikes: deque[int] = deque()

    def observe(self, value: float) -> bool:
        """Add the next value and return whether it is a spike.

        A value that is not finite is a spike, and enters no statistics.
        """
        moments = self._moments
        self.seen += 1
        self.baseline = moments.mean if moments.count >= self.warmup else None
        self.limit = self._limit()
        spike = True
        if math.isfinite(value):
            moments.add(min(value, self.limit))
            spike = value > self.limit and self.baseline is not None
        self.score = _FADING * self.score + spike
        if spike:
            self._spikes.append(self.seen)
        while self._spikes and self._spikes[0] <= self.seen - self.memory:
            self._spikes.popleft()
        return spike

    def count(self, window: int) -> int:
        """Return the number of spikes among the last ``window`` values, at most the memory."""
        return sum(at > self.seen - window for at in self._spikes)

    def _limit(self) -> float:
        moments = self._moments
        variance = moments.variance
        if variance is None:
            return math.inf
        scale = max(math.sqrt(variance), _ROUNDING * abs(moments.mean))
        # Only zeros so far: there is no scale to judge by, and a limit of zero would stay forever.
        if scale == 0:
            return math.inf
        known = moments.weights
        # A new value differs from the mean of the others by the noise of both.
        factor = upper_quantile(self._tail, known.degrees) * math.sqrt(1 + known.squares)
        return moments.mean + factor * scale


def explosion_limit(losses: SpikeDetector, increase: float) -> float:
    """Return the loss above which training counts as exploded; infinite if nothing is known yet.

    Args:
        losses: the detector that observes the losses.
        increase: multiple of the baseline, or the same distance above a negative baseline. Noise of
            the usual size is not an explosion, whatever ``increase`` is.
    """
    baseline = losses.baseline
    if baseline is None:
        return math.inf
    return max(baseline + (increase - 1) * abs(baseline), losses.limit)


@lru_cache(maxsize=16_384)
def upper_quantile(tail: float, degrees: float) -> float:
    """Return ``t`` with ``P(T > t) = tail`` for Student's t distribution."""
    return -float(stdtrit(degrees, tail))
