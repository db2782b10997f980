"""Which values of a noisy sequence are spikes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from arb_ternary_orchestrator.moments import Moments
from arb_ternary_orchestrator.student_t import upper_quantile

#: Noise smaller than this share of the mean is taken to be this large: it is rounding.
_ROUNDING: Final = 1e-6
#: By how much a spike fades in the score with each step.
_FADING: Final = 0.9


class SpikeDetector:
    """Tells values that are too high to be noise, and keeps them out of what it knows of the noise.

    A value is a spike when it lies more than ``k`` standard deviations above the mean of those
    before it, both exponentially weighted and free of bias. Of few values neither is known well, so
    that the limit stands further out then: at the quantile of Student's t distribution that a new
    Gaussian value exceeds as often as a Gaussian variable exceeds ``k`` standard deviations, 0.135
    % for ``k = 3``. With all weights at work (some 500 values for a decay of 0.99) it is ``3.05``
    standard deviations.

    What lies above the limit enters the statistics as the limit. It so widens them by a few
    percent: a single spike leaves the limit almost where it was, and a level that has risen for
    good becomes the usual one after a while. What this takes off the noise itself can be neglected
    for ``k`` from 3 on; for ``k = 2`` 2.6 % of it are called spikes, not 2.3 %.

    Args:
        k: standard deviations.
        decay: by how much the weight of a value falls with each that follows.
        warmup: values that are not called spikes (they are clipped all the same): a run begins with
            its steepest fall.
        memory: how far back :meth:`count` can look, in values.

    Attributes:
        seen: values so far, those that are not finite among them.
        baseline: mean of the values before the last one; None while there were fewer than
            ``warmup``.
        limit: what the last value had to exceed to be a spike; infinite while there were fewer than
            two before it.
        score: sum of ``0.9^age`` over all spikes, ages in values.
    """

    def __init__(
        self, k: float = 3.0, decay: float = 0.99, *, warmup: int = 10, memory: int = 1000
    ) -> None:
        if k <= 0 or warmup < 2 or memory < 1:
            raise ValueError(
                f"k and memory have to be positive and warmup at least 2, not {k}, {memory} and "
                f"{warmup}"
            )
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
        """Take in the next value; whether it is a spike. One that is not finite is, and enters no
        statistics.
        """
        moments = self._moments
        self.seen += 1
        self.baseline = moments.mean if moments.count >= self.warmup else None
        self.limit = self._limit()
        if math.isfinite(value):
            above = value > self.limit
            moments.add(self.limit if above else value)
            spike = above and self.baseline is not None
        else:
            spike = True
        self.score = _FADING * self.score + spike
        if spike:
            self._spikes.append(self.seen)
        while self._spikes and self._spikes[0] <= self.seen - self.memory:
            self._spikes.popleft()
        return spike

    def count(self, window: int) -> int:
        """Spikes among the last ``window`` values.

        Raises:
            ValueError: ``window`` is longer than the memory.
        """
        if window > self.memory:
            raise ValueError(
                f"the detector remembers spikes among {self.memory} values, not {window}: raise "
                f"its memory"
            )
        return sum(at > self.seen - window for at in self._spikes)

    def _limit(self) -> float:
        moments = self._moments
        deviation = moments.deviation
        if deviation is None:
            return math.inf
        scale = max(deviation, _ROUNDING * abs(moments.mean))
        # nothing but zeros so far: no scale to judge by, and a limit of zero would stay there for
        # ever
        if scale == 0:
            return math.inf
        known = moments.weights
        # A new value differs from the mean of the others by the noise of both.
        return (
            moments.mean
            + upper_quantile(self._tail, known.degrees) * math.sqrt(1 + known.squares) * scale
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "moments": self._moments.state_dict(),
            "seen": self.seen,
            "baseline": self.baseline,
            "limit": self.limit,
            "score": self.score,
            "spikes": list(self._spikes),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave."""
        self._moments.load_state_dict(state["moments"])
        self.seen = state["seen"]
        self.baseline = state["baseline"]
        self.limit = state["limit"]
        self.score = state["score"]
        self._spikes = deque(state["spikes"])
