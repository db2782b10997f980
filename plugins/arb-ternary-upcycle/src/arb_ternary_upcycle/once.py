"""Phases that do something once, without steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from arb_ternary.protocols.runs import PhaseResult

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


class OncePhase(ABC):
    """Its state is its metrics, once it has them; then nothing is left to do."""

    name: str
    _metrics: Mapping[str, float] | None = None

    @abstractmethod
    def work(self, context: TrainingContext) -> Mapping[str, float]:
        """Do what the phase is for, and return its metrics."""

    def run(self, context: TrainingContext) -> PhaseResult:
        """Do the work unless it is done; see ``Phase``."""
        if self._metrics is None:
            self._metrics = dict(self.work(context))
            context.mark_progress()
        context.save_checkpoint()
        return PhaseResult(steps=0, metrics=self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics, or None in their place before the work is done."""
        return {"metrics": self._metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._metrics = state.get("metrics")
