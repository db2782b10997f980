"""One training step, top to bottom, and the records that it returns.

A step is that of the mean loss over the predictions of all its micro-batches, however many each
has. A micro-batch whose loss is not finite keeps its index within the step but never reaches the
backward pass: it casts no vote and adds no gradient. Its predictions stay in the divisor, with
which the others may have cast their votes already; the reported loss leaves them out. If no
micro-batch of a step has a finite loss, the optimizer is not called. What an optimizer may declare
is in ``arb_ternary.optim.protocol``: one that defers its step keeps gradients and votes, and
neither is ``zero_grad`` called nor does the schedule advance before it has stepped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen
from torch.optim import Optimizer

from arb_ternary.errors import ArbError
from arb_ternary.optim.protocol import StepOutcome, Wraps, as_outcome, inner_optimizers, may_refuse
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.ternary.models import reset_runtime_state
from arb_ternary_train.gradients import gradient_norm
from arb_ternary_train.loop_state import Outcome
from arb_ternary_train.optim.joined import JoinedOptimizer

if TYPE_CHECKING:
    from arb_ternary_train.loop import TrainingLoop


@frozen
class StepReport:
    """One optimizer step.

    Attributes:
        step: steps that the loop has taken, this one included.
        loss: mean over the predictions of the micro-batches with a finite loss, in nats.
        outcome: what the optimizer reported.
        rates: ``lr`` of the first float group, ``rate`` of the first ternary group.
        draws: number of micro-batches with a finite loss.
        tokens: predictions that counted in the losses of the step.
        grad_norm: norm of all float gradients before clipping; None if they were not clipped.
    """

    step: int
    loss: float
    outcome: StepOutcome
    rates: Mapping[str, float]
    draws: int
    tokens: int
    grad_norm: float | None

    def metrics(self) -> dict[str, Any]:
        """Return the numbers for the metrics file. None of them depends on the clock."""
        outcome = self.outcome
        metrics: dict[str, Any] = {"loss": self.loss, **self.rates}
        grad_norm = outcome.grad_norm if self.grad_norm is None else self.grad_norm
        if grad_norm is not None:
            metrics["grad_norm"] = grad_norm
        metrics["flips"] = outcome.flips
        metrics["exponent_moves"] = outcome.exponent_moves
        metrics["draws"] = self.draws
        for key, value in outcome.statistics.items():
            metrics[key] = float(value)
        return metrics


@frozen
class Skip:
    """A micro-batch, or the gradient of a step, that was dropped because it was not finite.

    Attributes:
        what: ``loss`` or ``gradient``.
        value: the loss, or the norm of the gradient.
        microbatch: number of the micro-batch in the loop, from 1.
    """

    what: str
    value: float
    microbatch: int


@frozen
class StepResult:
    """The result of :func:`train_step`.

    Attributes:
        report: the step that was taken; None if the step needs more micro-batches, or was skipped.
        skips: what was dropped, in order: micro-batches without a finite loss, then perhaps the
            gradient of the step.
    """

    report: StepReport | None = None
    skips: tuple[Skip, ...] = field(default=())

    @property
    def skip(self) -> Skip | None:
        """The first of the skips."""
        return self.skips[0] if self.skips else None


class Diverged(ArbError):
    """Too many micro-batches in a row had no finite loss, or no finite gradient.

    Attributes:
        skips: what the last call of :func:`train_step` dropped.
    """

    def __init__(self, what: str, hint: str, skips: tuple[Skip, ...]) -> None:
        super().__init__(what, hint)
        self.skips = skips


def train_step(loop: TrainingLoop) -> StepResult:
    """Train on the next micro-batches of ``loop``; step the optimizer once a step is complete.

    In one process a call trains on one micro-batch, so that a run can stop after each of them. The
    schedule of the loop may have a call train on all micro-batches of a step.

    Raises:
        Diverged: too many micro-batches in a row had no finite loss or gradient.
    """
    started = time.perf_counter()
    accumulation = loop.options.gradient_accumulation_steps
    scaler = loop.scaler
    optimizer = loop.optimizer
    first = loop.microbatches + 1
    skips: list[Skip] = []

    # Rates are set before every micro-batch: votes are cast at the rate.
    rates = loop.apply_rates()

    # Count the predictions of the step: they decide what each micro-batch weighs.
    index_of_first = loop.in_flight.microbatch_index
    total = loop.schedule.draw(loop, index_of_first)

    # Forward and backward.
    own: list[Outcome] = []
    for index in loop.schedule.indices(loop, index_of_first, own):
        drawn = loop.next_microbatch(index)
        loss = loop.compute_loss(drawn.batch, drawn.masked.to(loop.context.device))
        outcome = Outcome(float(loss.detach()), drawn.predictions)
        if outcome.finite:
            mean_loss = drawn.weigh(loss, total) if accumulation > 1 else loss
            scaler.scale(mean_loss).backward()  # type: ignore[no-untyped-call]
        else:
            reset_runtime_state(loop.model)
        own.append(outcome)

    # Count the micro-batches of all processes.
    outcomes = loop.schedule.gather_outcomes(own)
    loop.context.mark_progress()
    for number, outcome in enumerate(outcomes, first):
        loop.in_flight = loop.in_flight.plus(outcome)
        if not outcome.finite:
            loop.count_skip(Skip("loss", outcome.loss, number), skips)

    report = None
    in_flight = loop.in_flight
    if in_flight.accumulated == accumulation and not in_flight.cast:
        # No micro-batch of the step had a finite loss.
        loop.in_flight = in_flight.attempted(dropped=True)
    elif in_flight.accumulated == accumulation:
        for observe in loop.gradient_observers:
            observe(loop)

        # Clip once per step, over the gradients of all float parameters.
        clips = loop.clip_norm is not None
        if clips:
            scaler.unscale_(optimizer)
        # A scaler looks itself for gradients that are not finite, does not call the optimizer, and
        # lowers its scale. A wrapper that refuses gradients looks at each draw.
        refuses = isinstance(optimizer, Wraps) and may_refuse(optimizer)
        looks_itself = scaler.is_enabled() or refuses
        norm = None
        if clips or not looks_itself:
            norm = gradient_norm(loop.model.parameters(), loop.clip_norm)

        # Step, but for a gradient that is not finite: it would reach every float parameter, and the
        # next checkpoint.
        if looks_itself or norm is None or math.isfinite(norm):
            signals = loop.signals(in_flight.recent_loss)
            scale = scaler.get_scale()
            result = as_outcome(scaler.step(optimizer, **signals), optimizer)
            scaler.update()
            if scaler.get_scale() < scale:
                result = skip_update(optimizer)
        else:
            result = evolve(skip_update(optimizer), grad_norm=norm)

        if result.skipped:
            norm = math.nan if result.grad_norm is None else result.grad_norm
            loop.count_skip(Skip("gradient", norm, loop.microbatches), skips)
        if not result.stepped:
            loop.in_flight = in_flight.attempted(dropped=result.skipped)
        else:
            optimizer.zero_grad()
            loop.count_step()
            report = StepReport(
                step=loop.step,
                loss=in_flight.mean_loss,
                outcome=result,
                rates=rates,
                draws=len(in_flight.losses),
                tokens=sum(in_flight.tokens),
                grad_norm=norm if clips else None,
            )

    tokens = sum(outcome.tokens for outcome in outcomes)
    loop.context.logbook.count_training(tokens, time.perf_counter() - started)
    return StepResult(report, tuple(skips))


def skip_update(optimizer: Optimizer) -> StepOutcome:
    """Drop the gradients and votes of a step that ``optimizer`` is not called for."""
    if isinstance(optimizer, TernaryOptimizer | JoinedOptimizer):
        return optimizer.skip_update()
    for each in inner_optimizers(optimizer):
        if isinstance(each, TernaryOptimizer):
            each.skip_update()
    optimizer.zero_grad()
    return StepOutcome(stepped=False, skipped=True)
