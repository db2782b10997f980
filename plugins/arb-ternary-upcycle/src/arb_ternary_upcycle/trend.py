"""Judges the losses of a block: whether it has converged, and whether its rates are too high."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import asdict, define, field, frozen

#: Decay of the running mean of the losses.
_DECAY: Final = 0.9
#: Share by which a mean must be below the lowest so far to count as lower, as in torch's
#: ReduceLROnPlateau.
_LOWER: Final = 1e-4
#: A loss of more than this many times the running mean before it is a spike.
_SPIKE: Final = 1.5
#: Losses before the first spike, and between a decision and the next spike.
_CALM: Final = 10


@define
class Trend:
    """A running mean of losses: ``m_n = (1 - d) sum d**(n - i) l_i / (1 - d**n)``, ``d = 0.9``.

    Attributes:
        count: losses so far.
        total: the numerator of the mean.
        best: lowest mean so far; None before the first loss.
        stale: losses since the mean last fell below ``best``.
    """

    count: int = 0
    total: float = 0.0
    best: float | None = None
    stale: int = 0

    @property
    def mean(self) -> float:
        """Running mean; 0 before the first loss."""
        return self.total / (1.0 - _DECAY**self.count) if self.count else 0.0

    def observe(self, loss: float) -> None:
        """Add a loss."""
        self.count += 1
        self.total = _DECAY * self.total + (1.0 - _DECAY) * loss
        if self.best is None or self.mean < self.best * (1.0 - _LOWER):
            self.best = self.mean
            self.stale = 0
        else:
            self.stale += 1


@define
class Convergence:
    """Whether a block has converged: its mean loss is at most ``target``, or no longer falls.

    Attributes:
        target: None = a block takes all its steps.
        patience: losses without a lower mean that end a block.
        trend: of the losses.
    """

    target: float | None
    patience: int
    trend: Trend = field(factory=Trend)

    @property
    def done(self) -> bool:
        """Whether the block needs no further steps."""
        trend = self.trend
        if self.target is None or not trend.count:
            return False
        return trend.mean <= self.target or trend.stale >= self.patience

    @property
    def reason(self) -> str:
        """Why the block has ended."""
        if self.done and self.target is not None:
            if self.trend.mean <= self.target:
                return f"at most {self.target:g}"
            return f"not lower for {self.trend.stale} steps"
        return "steps over"


@frozen
class Decision:
    """A change of rates after a step.

    Attributes:
        cause: ``spike`` or ``plateau``.
        factor: factor of the scheduled rates from then on.
        lowers: whether it is lower than before; False at the floor.
    """

    cause: str
    factor: float
    lowers: bool


@define
class Autotune:
    """Multiplies ``factor`` by ``decay`` at spikes and plateaus of the loss, down to ``floor``.

    A spike is a loss of more than 1.5 times the running mean before it. A plateau is ``patience``
    losses without a lower mean since the last decision. The ten losses after a decision are no
    spikes.

    Attributes:
        patience: losses without a lower running mean that are a plateau.
        decay: factor of one decision.
        floor: lowest factor.
        factor: factor of the scheduled rates now.
        calm: losses since the last decision.
        waited: losses since the last decision or lower mean.
        trend: of the losses.
    """

    patience: int
    decay: float
    floor: float
    factor: float = 1.0
    calm: int = 0
    waited: int = 0
    trend: Trend = field(factory=Trend)

    def observe(self, loss: float) -> Decision | None:
        """Add the loss of a step, and return what to do after it, if anything."""
        trend = self.trend
        before = self.trend.mean
        spike = trend.count >= _CALM and self.calm >= _CALM and loss > _SPIKE * before
        trend.observe(loss)
        self.calm += 1
        self.waited = 0 if trend.stale == 0 else self.waited + 1
        if not spike and self.waited < self.patience:
            return None
        factor = max(self.floor, self.factor * self.decay)
        lowers = factor < self.factor
        self.factor = min(factor, self.factor)
        self.calm = 0
        self.waited = 0
        return Decision("spike" if spike else "plateau", self.factor, lowers)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed block needs."""
        return {
            "factor": self.factor,
            "calm": self.calm,
            "waited": self.waited,
            "trend": asdict(self.trend),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``."""
        self.factor = state["factor"]
        self.calm = state["calm"]
        self.waited = state["waited"]
        self.trend = Trend(**state["trend"])
