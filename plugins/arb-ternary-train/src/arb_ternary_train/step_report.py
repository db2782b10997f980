"""One optimizer step, and what it told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from arb_ternary.optim.protocol import StepOutcome


@frozen
class StepReport:
    """One optimizer step.

    Attributes:
        step: steps that the loop has taken, this one included.
        loss: mean loss of the step's micro-batches, of those that have a finite one; nats a
            prediction.
        outcome: what the optimizer reported.
        rates: ``lr`` of the first float group, ``rate`` of the first ternary group.
        draws: micro-batches that took part in the step: those with a finite loss.
        tokens: predictions that counted in the step's losses.
        grad_norm: norm of all float gradients before clipping, where it was clipped.
    """

    step: int
    loss: float
    outcome: StepOutcome
    rates: Mapping[str, float]
    draws: int
    tokens: int
    grad_norm: float | None

    def metrics(self) -> dict[str, Any]:
        """The numbers for the metrics file: nothing that depends on the clock."""
        outcome = self.outcome
        grad_norm = self.grad_norm if self.grad_norm is not None else outcome.grad_norm
        return {
            "loss": self.loss,
            **self.rates,
            **({} if grad_norm is None else {"grad_norm": grad_norm}),
            "flips": outcome.flips,
            "exponent_moves": outcome.exponent_moves,
            "draws": self.draws,
            **{key: float(value) for key, value in outcome.statistics.items()},
        }
