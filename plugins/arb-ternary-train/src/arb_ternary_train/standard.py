"""The phase ``standard``: end-to-end training or fine-tuning for a number of steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from arb_ternary.protocols.runs import PhaseResult
from arb_ternary_train.growing_batches import GrowingBatches, joined_at
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.model_state import load_weights
from arb_ternary_train.options import StandardConfig
from arb_ternary_train.policy import add_counts
from arb_ternary_train.step import StepReport

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


class StandardPhase:
    """Trains for ``config.steps`` steps.

    A phase that trains in the same way with a loop of its own overrides :meth:`make_loop`.
    """

    name = "standard"

    def __init__(self, config: StandardConfig) -> None:
        self.config = config
        self._loop: TrainingLoop | None = None
        self._restored: Mapping[str, Any] | None = None
        self._last_loss: float | None = None

    def run(self, context: TrainingContext) -> PhaseResult:
        """Train to the last step, from the start or from a restored state; see ``Phase``."""
        config = self.config
        resumed = self._restored is not None
        if not resumed and config.init_from is not None:
            load_weights(
                context.model,
                Path(config.init_from),
                seed=context.seed,
                options=context.config.model,
                skip=config.init_skip or (),
                where=f"phases[{context.phase_index}].init_skip",
            )

        loop = self._loop = self.make_loop(context, resumed=resumed)
        doublings = config.batch_doublings
        if doublings:
            loop.batches = GrowingBatches(
                loop.batches, lambda: joined_at(doublings, loop.step, config.steps)
            )
        try:
            if self._restored is not None:
                self._last_loss = self._restored["last_loss"]
                loop.load_state_dict(self._restored["loop"])
                self._restored = None
                context.finish_evaluation()

            context.logbook.reporter.start(self.name, config.steps, loop.step)
            while loop.step < config.steps:
                report = loop.train_microbatch()
                if report is not None:
                    self._last_loss = report.loss
                    log_and_evaluate(context, report, config, steps=config.steps)
                    context.checkpoint_if_due()
                context.stop_if_requested()
            context.save_checkpoint()
        finally:
            loop.close()
        context.logbook.reporter.stop()

        metrics = {"skipped": float(loop.skipped)}
        if self._last_loss is not None:
            metrics["train_loss"] = self._last_loss
        add_counts(metrics, loop.policy)
        return PhaseResult(steps=loop.step, metrics=metrics)

    def make_loop(self, context: TrainingContext, *, resumed: bool) -> TrainingLoop:
        """Return the loop that trains.

        Args:
            context: the run.
            resumed: whether the phase continues from a restored state.
        """
        return TrainingLoop(context, self.config, key=f"phase {context.phase_index}")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loop."""
        if self._loop is None:
            raise RuntimeError("the standard phase has not begun")
        return {"loop": self._loop.state_dict(), "last_loss": self._last_loss}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state`` when the phase is run."""
        self._restored = state


def log_and_evaluate(
    context: TrainingContext,
    report: StepReport,
    options: Any,
    *,
    steps: int,
    ends_phase: bool = True,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Record a step, then evaluate if an evaluation is due.

    Args:
        context: the run.
        report: report of the step.
        options: options of the phase: ``log_every``, ``eval_every`` and ``eval_batches`` as in
            ``LoopOptions``.
        steps: steps that the loop will take.
        ends_phase: whether the loop's last step is that of the phase.
        more: further numbers of the step.
    """
    last = report.step == steps
    log = last or report.step % options.log_every == 0
    metrics = {**report.metrics(), **more}
    context.record_step(metrics, tokens=report.tokens, phase_step=report.step, log=log)

    # The end of a run has an evaluation of its own.
    at_the_end = context.in_last_phase and last and ends_phase
    due = options.eval_every and report.step % options.eval_every == 0
    if due and not at_the_end:
        context.evaluate_or_defer(options.eval_batches)
    elif not context.reporting_behind:
        context.finish_evaluation()


def build(config: StandardConfig) -> StandardPhase:
    """Build the phase ``standard``."""
    return StandardPhase(config)
