"""What is known of a training run at a step: the numbers of the step, where the loss is going, and
the phase.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from attrs import frozen

from arb_ternary_orchestrator.moments import Moments

Phase = Literal["unstable", "warm-up", "converging", "plateau", "early", "mid", "late"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)

#: A line is fitted to so many losses at least.
LEAST_POINTS: Final = 5


@frozen
class Trend:
    """A line fitted to the last losses by ordinary least squares.

    Attributes:
        slope: change of the loss a step.
        error: its standard error, from what the line leaves unexplained.
        noise: standard deviation of the losses about the line.
        span: steps from the first to the last of these losses.
    """

    slope: float
    error: float
    noise: float
    span: int

    @property
    def significance(self) -> float:
        """Slope in standard errors; about normal with variance 1 where the loss is only noise."""
        return (
            self.slope / self.error
            if self.error
            else math.copysign(math.inf, self.slope)
            if self.slope
            else 0.0
        )

    @property
    def fall(self) -> float:
        """By how much the line falls over the span; negative where it rises."""
        return -self.slope * self.span


@frozen(kw_only=True)
class PhaseLimits:
    """What makes a phase of training; see :attr:`Telemetry.phase`.

    Attributes:
        warmup_steps: steps of warm-up of the learning rate.
        planned_steps: of the whole loop; None where there is no plan, and then no step is early or
            late.
        early: share of the planned steps that is early.
        late: share of the planned steps after which it is late.
        rising: standard errors by which the slope has to be above zero to be unstable.
        flat: standard errors by which the slope has to be below zero not to be a plateau.
        steep: how often the noise has to go into the fall over the window for the loss to be
            converging.
    """

    warmup_steps: int = 0
    planned_steps: int | None = None
    early: float = 0.2
    late: float = 0.8
    rising: float = 3.0
    flat: float = 2.0
    steep: float = 2.0


class Telemetry:
    """Running numbers of a training loop. Losses that are not finite are counted, and enter nothing
    else.

    Args:
        window: losses that the trend looks at.
        decay: of the exponential weights of mean and variance of the loss.
        limits: of the phases.
        weights: ternary weights of each module that has some, for flip rates.

    Attributes:
        step: the last one; 0 before the first.
        loss: of the last step, as it was.
        best: lowest finite loss so far; ``inf`` before the first.
        best_step: the step that it was reached at.
        grad_norm: of all gradients of the last step; None where it was not measured.
        modules: norm of the gradients of each top-level module.
        update_ratio: norm of the last update of the float parameters over the norm of these; None
            where not measured.
        lr: learning rate of the last step; None where no part has one.
        flips: ternary weights that changed in the last step, by module.
    """

    def __init__(
        self,
        window: int = 200,
        *,
        decay: float = 0.99,
        limits: PhaseLimits | None = None,
        weights: Mapping[str, int] | None = None,
    ) -> None:
        if window < LEAST_POINTS:
            raise ValueError(
                f"a line needs a window of {LEAST_POINTS} losses at least, not {window}"
            )
        self.window = window
        self.limits = limits or PhaseLimits()
        self.weights = dict(weights or {})
        self._moments = Moments(decay)
        self._points: deque[tuple[int, float]] = deque(maxlen=window)
        self._since_finite_only = window
        self.step = 0
        self.loss = math.nan
        self.best = math.inf
        self.best_step = 0
        self.grad_norm: float | None = None
        self.update_ratio: float | None = None
        self.lr: float | None = None
        self.modules: dict[str, float] = {}
        self.flips: dict[str, int] = {}

    def observe(
        self,
        step: int,
        loss: float,
        *,
        grad_norm: float | None = None,
        modules: Mapping[str, float] | None = None,
        update_ratio: float | None = None,
        lr: float | None = None,
        flips: Mapping[str, int] | None = None,
    ) -> None:
        """Step ``step`` has been taken, or tried where its loss is not finite."""
        self.step = step
        self.loss = loss
        self.grad_norm = grad_norm
        self.update_ratio = update_ratio
        self.lr = lr
        self.modules = dict(modules or {})
        self.flips = dict(flips or {})
        if not math.isfinite(loss):
            self._since_finite_only = 0
            return
        self._since_finite_only = min(self._since_finite_only + 1, self.window)
        self._points.append((step, loss))
        self._moments.add(loss)
        if loss < self.best:
            self.best = loss
            self.best_step = step

    @property
    def ema(self) -> float | None:
        """Exponentially weighted mean of the loss, without bias; None before the first finite
        loss.
        """
        return self._moments.mean if self._moments.count else None

    @property
    def variance(self) -> float | None:
        """Exponentially weighted variance of the loss, without bias; None before the second finite
        loss.
        """
        return self._moments.variance

    @property
    def flip_rates(self) -> dict[str, float]:
        """Share of the ternary weights that changed in the last step, by module."""
        return {
            name: count / self.weights[name]
            for name, count in self.flips.items()
            if self.weights.get(name)
        }

    @property
    def trend(self) -> Trend | None:
        """Of the losses in the window; None while there are fewer than five, or all at one step."""
        n = len(self._points)
        if n < LEAST_POINTS:
            return None
        middle = math.fsum(step for step, _ in self._points) / n
        mean = math.fsum(loss for _, loss in self._points) / n
        spread = math.fsum((step - middle) ** 2 for step, _ in self._points)
        if spread == 0:
            return None
        slope = math.fsum((step - middle) * (loss - mean) for step, loss in self._points) / spread
        rest = math.fsum(
            (loss - mean - slope * (step - middle)) ** 2 for step, loss in self._points
        ) / (n - 2)
        return Trend(
            slope,
            math.sqrt(rest / spread),
            math.sqrt(rest),
            self._points[-1][0] - self._points[0][0],
        )

    @property
    def slope(self) -> float | None:
        """Change of the loss a step; None while there are fewer than five losses."""
        return None if (trend := self.trend) is None else trend.slope

    @property
    def phase(self) -> Phase:
        """The first of these that holds.

        ============
        ===========================================================================================
        unstable a loss within the window was not finite, or the loss rises by ``rising`` standard
        errors warm-up no more than ``warmup_steps`` steps, or fewer than five losses converging
        over the window the loss falls by more than ``steep`` times its noise, and significantly
        plateau the window is full and the slope is not ``flat`` standard errors below zero early of
        the planned steps no more than the share ``early`` has been taken late of the planned steps
        more than the share ``late`` has been taken mid anything else ============
        ===========================================================================================
        """
        limits = self.limits
        trend = self.trend
        if self._since_finite_only < self.window or (
            trend is not None and trend.significance > limits.rising
        ):
            return "unstable"
        if self.step <= limits.warmup_steps or trend is None:
            return "warm-up"
        falls = trend.significance < -limits.flat
        if falls and trend.fall > limits.steep * trend.noise:
            return "converging"
        if not falls and len(self._points) == self.window:
            return "plateau"
        done = self.step / limits.planned_steps if limits.planned_steps else None
        if done is not None and done <= limits.early:
            return "early"
        return "late" if done is not None and done > limits.late else "mid"

    def numbers(self) -> dict[str, Any]:
        """Everything at once, in plain values: for metrics and reports."""
        return {
            "loss": self.loss,
            "ema": self.ema,
            "variance": self.variance,
            "slope": self.slope,
            "best": self.best if math.isfinite(self.best) else None,
            "training_phase": self.phase,
            "grad_norm": self.grad_norm,
            "module_grad_norms": dict(self.modules),
            "update_ratio": self.update_ratio,
            "lr": self.lr,
            "flips": dict(self.flips),
            "flip_rates": self.flip_rates,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts."""
        return {
            "moments": self._moments.state_dict(),
            "points": [list(point) for point in self._points],
            "since_finite_only": self._since_finite_only,
            "step": self.step,
            "loss": self.loss,
            "best": self.best,
            "best_step": self.best_step,
            "grad_norm": self.grad_norm,
            "modules": dict(self.modules),
            "update_ratio": self.update_ratio,
            "lr": self.lr,
            "flips": dict(self.flips),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave."""
        self._moments.load_state_dict(state["moments"])
        self._points = deque(((step, loss) for step, loss in state["points"]), maxlen=self.window)
        self._since_finite_only = state["since_finite_only"]
        self.step = state["step"]
        self.loss = state["loss"]
        self.best = state["best"]
        self.best_step = state["best_step"]
        self.grad_norm = state["grad_norm"]
        self.update_ratio = state["update_ratio"]
        self.lr = state["lr"]
        self.modules = dict(state["modules"])
        self.flips = dict(state["flips"])
