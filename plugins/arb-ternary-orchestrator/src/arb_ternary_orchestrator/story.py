"""Telling what was decided: to the run's files, and to the person who watches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from arb_ternary_orchestrator.branches import Trial
from arb_ternary_orchestrator.decision_log import DecisionLog
from arb_ternary_orchestrator.decisions import Trigger

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


class Story:
    """The decisions of one loop, as ``orchestrator_decisions.jsonl`` and the run's metrics have
    them.

    Args:
        context: the run.
        known: decisions that the checkpoint knows which is gone on from; None = the loop begins.
    """

    def __init__(self, context: TrainingContext, known: int | None) -> None:
        self._context = context
        self.log = DecisionLog(context.directory)
        if known is None:
            self.log.begin_at(context.step)
        else:
            self.log.go_on_after(known)

    def decided(
        self,
        trigger: Trigger,
        before: str,
        after: str,
        *,
        trials: Sequence[Trial] = (),
        steps_spent: int = 0,
        seconds: float = 0.0,
        rolled_back_to: int | None = None,
        not_begun: str | None = None,
        untold: int = 0,
        numbers: Mapping[str, Any],
    ) -> None:
        """Write a decision down.

        Args:
            trigger: why it was due.
            before: the strategy until now.
            after: the strategy from now on.
            trials: of the candidates.
            steps_spent: steps of candidates that are not kept.
            seconds: that the decision took.
            rolled_back_to: step of the run whose state was restored.
            not_begun: why candidates were not compared.
            untold: steps taken that the run has not been told of yet.
            numbers: the telemetry at the time.
        """
        values = {
            "step": self._context.step + untold,
            "from": before,
            "to": after,
            "reason": trigger.reason,
            "metric": trigger.metric,
            "value": trigger.value,
            "candidates": [trial.to_json() for trial in trials],
            "steps_spent": steps_spent,
            "rolled_back_to": rolled_back_to,
            "not_begun": not_begun,
        }
        outcome = _outcome(before, after, rolled_back_to, not_begun)
        mark = _mark(before, after, rolled_back_to, compared=bool(trials))
        record = self._context.record("decision", {**values, **mark})
        written = {"phase": record["phase"], **values, "telemetry": dict(numbers)}
        self.log.write({**written, "seconds": seconds})
        self._context.mark_progress()
        self.note(
            f"{trigger.reason} ({trigger.metric} {trigger.value:.4g}): {outcome}{_rewards(trials)}"
        )

    def note(self, text: str) -> None:
        """A lasting line on the screen."""
        self._context.note(f"step {self._context.step}: orchestrator: {text}")


def _outcome(before: str, after: str, rolled_back_to: int | None, not_begun: str | None) -> str:
    if not_begun is not None:
        return f"strategies are not compared: {not_begun}"
    switched = f"{before} to {after}" if before != after else f"stays with {after}"
    return switched if rolled_back_to is None else f"back to step {rolled_back_to}, {switched}"


def _mark(before: str, after: str, rolled_back_to: int | None, *, compared: bool) -> dict[str, str]:
    """What a figure of the run shows of it: nothing where nothing has come of it."""
    if rolled_back_to is not None:
        return {"mark": f"back to step {rolled_back_to}", "mark_kind": "rollback"}
    if before != after:
        return {"mark": after, "mark_kind": "switch"}
    return {"mark": "compared", "mark_kind": "branch"} if compared else {}


def _rewards(trials: Sequence[Trial]) -> str:
    told = (
        f"{trial.name} {'failed' if trial.reward is None else format(trial.reward, '.3f')}"
        for trial in trials
    )
    return f"; rewards: {', '.join(told)}" if trials else ""
