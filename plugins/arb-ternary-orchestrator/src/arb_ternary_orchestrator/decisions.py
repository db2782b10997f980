"""When to think about the strategy: at which steps, and for what reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from attrs import frozen

from arb_ternary_orchestrator.spikes import SpikeDetector
from arb_ternary_orchestrator.telemetry import Phase, Telemetry

Reason = Literal["safety", "spike", "plateau", "periodic", "phase_change", "manual", "recovered"]


@frozen
class Trigger:
    """Why a decision is due.

    Attributes:
        reason: its kind.
        metric: what was looked at, in words.
        value: what that was.
    """

    reason: Reason
    metric: str
    value: float


@frozen(kw_only=True)
class DecisionOptions:
    """What makes a decision due.

    Attributes:
        decision_interval: steps after which one is due anyway.
        hysteresis: steps after a switch or an evaluation in which nothing but a rollback is
            decided.
        max_loss_increase: how many times the baseline a loss may be.
        spike_window: steps in which spikes are counted.
        spike_count: spikes among these that are too many.
        phase_hold: steps for which an estimated phase has to hold before it counts.
    """

    decision_interval: int = 500
    hysteresis: int = 200
    max_loss_increase: float = 1.5
    spike_window: int = 100
    spike_count: int = 3
    phase_hold: int = 20


def allowed_loss(losses: SpikeDetector, increase: float) -> float:
    """The loss above which training counts as exploded; infinite while nothing is known.

    Args:
        losses: the detector that sees them.
        increase: times the baseline; for one below zero, as far above it. No noise that is usual is
            an explosion.
    """
    baseline = losses.baseline
    if baseline is None:
        return math.inf
    return max(baseline + (increase - 1) * abs(baseline), losses.limit)


class DecisionBoundary:
    """Says at each step whether a decision is due. Of several reasons the first of this order is
    given:

    1. *safety*: the loss (or a gradient) is not finite, or it exceeds ``max_loss_increase`` times
       the mean of those before it, and what noise explains: the detector's limit. It heeds no
       hysteresis.
    2. Within ``hysteresis`` steps of the last switch, evaluation or rollback (and of the start)
       nothing is due.
    3. *spike*: ``spike_count`` spikes within ``spike_window`` steps and since the last decision.
    4. *plateau*: the estimated phase is one.
    5. *periodic*: ``decision_interval`` steps since the last decision.
    6. *phase_change*: another phase than at the last decision has held for ``phase_hold`` steps.
       The end of the warm-up is no change: nothing was known before it.
    7. *manual*: somebody asked. A request that had to stand back behind one decision comes first at
       the next, or a plateau that lasts would put it off for ever.

    Args:
        options: the numbers in this.
        start: the step that the training begins after.
    """

    def __init__(self, options: DecisionOptions, start: int = 0) -> None:
        self.options = options
        self._last = start
        self._phase: Phase | None = None
        self._settled: Phase | None = None
        self._held = 0
        self._stood_back = False

    def decide(
        self,
        telemetry: Telemetry,
        spikes: SpikeDetector,
        step: int,
        *,
        finite: bool,
        loss: float,
        manual: str | None,
    ) -> Trigger | None:
        """Why a decision is due after step ``step``; None where none is.

        Call it once a step, after telemetry and detector have seen the loss of the step.

        Args:
            telemetry: of the run.
            spikes: the detector that sees the losses.
            step: steps taken.
            finite: whether loss and gradients of the step are.
            loss: of the step.
            manual: the strategy that somebody asked for.
        """
        options = self.options
        self._follow(telemetry.phase)
        if (danger := self._danger(telemetry, spikes, finite, loss)) is not None:
            return danger
        since = step - self._last
        if since < options.hysteresis:
            return None
        if manual is not None and self._stood_back:
            return self._asked(manual, step)
        trigger = self._due(telemetry, spikes, since)
        if trigger is None and manual is not None:
            return self._asked(manual, step)
        self._stood_back = manual is not None
        return trigger

    def decided(self, step: int) -> None:
        """A switch, an evaluation or a rollback has ended at step ``step``; the hysteresis counts
        from here.
        """
        self._last = step
        self._settled = self._phase

    def _follow(self, phase: Phase) -> None:
        self._held = self._held + 1 if phase == self._phase else 1
        self._phase = phase
        if (
            self._settled in (None, "warm-up")
            and phase != "warm-up"
            and self._held >= self.options.phase_hold
        ):
            self._settled = phase

    def _danger(
        self, telemetry: Telemetry, spikes: SpikeDetector, finite: bool, loss: float
    ) -> Trigger | None:
        if not math.isfinite(loss):
            return Trigger("safety", "loss", loss)
        if not finite:
            norm = telemetry.grad_norm
            return Trigger("safety", "gradient norm", math.nan if norm is None else norm)
        baseline = spikes.baseline
        if baseline is not None and loss > allowed_loss(spikes, self.options.max_loss_increase):
            return Trigger("safety", "loss / baseline", loss / baseline if baseline else math.inf)
        return None

    def _due(self, telemetry: Telemetry, spikes: SpikeDetector, since: int) -> Trigger | None:
        options = self.options
        window = min(options.spike_window, since)
        if window and (count := spikes.count(window)) >= options.spike_count:
            return Trigger("spike", f"spikes in {window} steps", count)
        if self._phase == "plateau" and (trend := telemetry.trend) is not None:
            return Trigger("plateau", "slope in standard errors", trend.significance)
        if since >= options.decision_interval:
            return Trigger("periodic", "steps since the last decision", since)
        if self._settled not in (None, "warm-up", self._phase) and self._held >= options.phase_hold:
            return Trigger("phase_change", f"phase {self._settled} to {self._phase}", self._held)
        return None

    def _asked(self, name: str, step: int) -> Trigger:
        self._stood_back = False
        return Trigger("manual", f"asked for {name}", step)

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "last": self._last,
            "phase": self._phase,
            "settled": self._settled,
            "held": self._held,
            "stood_back": self._stood_back,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave."""
        self._last = state["last"]
        self._held = state["held"]
        self._stood_back = state["stood_back"]
        self._phase = state["phase"]
        self._settled = state["settled"]
