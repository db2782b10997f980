"""Triggers of decisions about the strategy: when one is due, and why."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from attrs import frozen

from arb_ternary_orchestrator.spikes import explosion_limit
from arb_ternary_orchestrator.state import Stateful

if TYPE_CHECKING:
    from arb_ternary_orchestrator.config import OrchestratorConfig
    from arb_ternary_orchestrator.spikes import SpikeDetector
    from arb_ternary_orchestrator.telemetry import Observation, Telemetry
    from arb_ternary_orchestrator.training_phases import Phase

Reason = Literal[
    "safety", "spike", "flips", "plateau", "periodic", "phase_change", "manual", "recovered"
]
#: Share of the trits that flip in a step above which the rate of votes is far too high: trits move
#: back and forth. It is 0.1 to 0.6 % in runs that learn well, and at most 2 %.
_RESTLESS: Final = 0.03


@frozen
class Trigger:
    """Why a decision is due.

    Attributes:
        reason: its kind.
        metric: the number that was looked at, in words.
        value: its value.
    """

    reason: Reason
    metric: str
    value: float


class DecisionBoundary(Stateful):
    """Decides after each step whether a decision is due. The first of these reasons is given:

    1. *safety*: the loss or a gradient is not finite, or the loss exceeds both
       ``max_loss_increase`` times the mean of the losses before it and the detector's limit, which
       is what noise explains. It ignores the hysteresis.
    2. Within ``hysteresis`` steps of the last switch, evaluation or rollback (and of the start)
       nothing is due.
    3. *spike*: ``spike_count`` spikes within ``spike_window`` steps and since the last decision.
    4. *flips*: more than 3 % of all trits flipped in the step, so their rate is far too high.
    5. *plateau*: the estimated phase is a plateau.
    6. *periodic*: ``decision_interval`` steps since the last decision.
    7. *phase_change*: another phase than at the last decision has held for ``phase_hold`` steps.
       The end of the warm-up is not a change, because nothing was known before it.
    8. *manual*: a user asked for a strategy. A request that was postponed by one decision comes
       first at the next, or else a long plateau would postpone it forever.

    Args:
        options: the numbers above.
    """

    state_names: ClassVar[tuple[str, ...]] = ("_last", "_phase", "_settled", "_held", "_stood_back")

    def __init__(self, options: OrchestratorConfig) -> None:
        self.options = options
        self._last = 0
        self._phase: Phase | None = None
        self._settled: Phase | None = None
        self._held = 0
        self._stood_back = False

    def decide(
        self, telemetry: Telemetry, losses: SpikeDetector, manual: str | None
    ) -> Trigger | None:
        """Return why a decision is due after a step; None if none is.

        Call it once per step, after telemetry and detector have observed the step.

        Args:
            telemetry: running numbers of the loop.
            losses: the detector that observes the losses.
            manual: the strategy that a user asked for.
        """
        seen = telemetry.last
        self._follow(telemetry.phase)
        danger = self._danger(losses, seen)
        if danger is not None:
            return danger
        since = seen.step - self._last
        if since < self.options.hysteresis:
            return None
        trigger = self._due(telemetry, losses, since)
        if manual is not None and (self._stood_back or trigger is None):
            self._stood_back = False
            return Trigger("manual", f"asked for {manual}", seen.step)
        self._stood_back = manual is not None
        return trigger

    def decided(self, step: int) -> None:
        """Start the hysteresis: a switch, an evaluation or a rollback has ended at ``step``."""
        self._last = step
        self._settled = self._phase

    def _follow(self, phase: Phase) -> None:
        self._held = self._held + 1 if phase == self._phase else 1
        self._phase = phase
        warm = self._settled not in (None, "warm-up")
        if not warm and phase != "warm-up" and self._held >= self.options.phase_hold:
            self._settled = phase

    def _danger(self, losses: SpikeDetector, seen: Observation) -> Trigger | None:
        if not math.isfinite(seen.loss):
            return Trigger("safety", "loss", seen.loss)
        if not seen.finite:
            return Trigger("safety", "gradient norm", seen.grad_norm or math.nan)
        baseline = losses.baseline
        limit = explosion_limit(losses, self.options.max_loss_increase)
        if baseline is None or seen.loss <= limit:
            return None
        return Trigger("safety", "loss / baseline", seen.loss / baseline if baseline else math.inf)

    def _due(self, telemetry: Telemetry, losses: SpikeDetector, since: int) -> Trigger | None:
        options = self.options
        window = min(options.spike_window, since)
        spikes = losses.count(window) if window else 0
        if spikes >= options.spike_count:
            return Trigger("spike", f"spikes in {window} steps", spikes)
        flipping = telemetry.flip_rate
        if flipping is not None and flipping > _RESTLESS:
            return Trigger("flips", "share of the trits that flip in a step", flipping)
        trend = telemetry.trend
        if self._phase == "plateau" and trend is not None:
            return Trigger("plateau", "slope in standard errors", trend.significance)
        if since >= options.decision_interval:
            return Trigger("periodic", "steps since the last decision", since)
        changed = self._settled not in (None, "warm-up", self._phase)
        if changed and self._held >= options.phase_hold:
            return Trigger("phase_change", f"phase {self._settled} to {self._phase}", self._held)
        return None
