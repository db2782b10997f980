"""The standard phase: end-to-end training or fine-tuning for a number of steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from arb_ternary.protocols.runs import PhaseResult
from arb_ternary_train.growing_batches import GrowingBatches, joined_at
from arb_ternary_train.init_from import load_weights
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.options import StandardConfig
from arb_ternary_train.policy import add_counts
from arb_ternary_train.step_report import StepReport

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


@runtime_checkable
class LogOptions(Protocol):
    """Options of a phase: how often a step is shown, and evaluated after."""

    @property
    def log_every(self) -> int: ...

    @property
    def eval_every(self) -> int: ...

    @property
    def eval_batches(self) -> int | None: ...


class StandardPhase:
    """Trains for ``config.steps`` steps. A phase that does so with a loop of its own overrides
    :meth:`make_loop`.
    """

    name = "standard"

    def __init__(self, config: StandardConfig) -> None:
        self.config = config
        self._loop: TrainingLoop | None = None
        self._restored: Mapping[str, Any] | None = None
        self._last_loss: float | None = None

    def run(self, context: TrainingContext) -> PhaseResult:
        """Train to the last step, from the start or from where ``load_state_dict`` left off; see
        ``Phase``.
        """
        config = self.config
        reporter = context.logbook.reporter
        if self._restored is None and config.init_from is not None:
            load_weights(
                context.model,
                Path(config.init_from),
                seed=context.seed,
                options=context.config.model,
                skip=config.init_skip or (),
                where=f"phases[{context.phase_index}].init_skip",
            )
        loop = self._loop = self.make_loop(context, resumed=self._restored is not None)
        if doublings := config.batch_doublings:
            loop.batches = GrowingBatches(
                loop.batches, lambda: joined_at(doublings, loop.step, config.steps)
            )
        try:
            if self._restored is not None:
                self._last_loss = self._restored["last_loss"]
                loop.load_state_dict(self._restored["loop"])
                self._restored = None
                context.finish_evaluation()
            reporter.start(self.name, config.steps, loop.step)
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
        reporter.stop()
        loss = {} if self._last_loss is None else {"train_loss": self._last_loss}
        metrics = {"skipped": float(loop.skipped), **loss}
        add_counts(metrics, loop.policy)
        return PhaseResult(steps=loop.step, metrics=metrics)

    def make_loop(self, context: TrainingContext, *, resumed: bool) -> TrainingLoop:
        """The loop that trains.

        Args:
            context: the run.
            resumed: the phase goes on where it was stopped, or else begins.
        """
        return TrainingLoop(context, self.config, key=f"phase {context.phase_index}")

    def state_dict(self) -> dict[str, Any]:
        """The loop's state."""
        if self._loop is None:
            raise RuntimeError("the standard phase has not begun")
        return {"loop": self._loop.state_dict(), "last_loss": self._last_loss}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state`` when the phase is run."""
        self._restored = state


def log_and_evaluate(
    context: TrainingContext,
    report: StepReport,
    options: LogOptions,
    *,
    steps: int,
    ends_phase: bool = True,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write a step down, then evaluate where that is due.

    Args:
        context: the run.
        report: of the step.
        options: how often a step is shown, and evaluated after.
        steps: that the loop will take.
        ends_phase: whether the loop's last step is that of the phase.
        more: further numbers of the step.
    """
    last = report.step == steps
    log = last or report.step % options.log_every == 0
    context.record_step(
        {**report.metrics(), **more}, tokens=report.tokens, phase_step=report.step, log=log
    )
    # The end of a run has an evaluation of its own.
    at_the_end = context.in_last_phase and last and ends_phase
    if options.eval_every and report.step % options.eval_every == 0 and not at_the_end:
        context.evaluate_when_settled(options.eval_batches)
    elif not context.held:
        context.finish_evaluation()


def build(config: StandardConfig) -> StandardPhase:
    """The factory that the ``standard`` phase registers."""
    return StandardPhase(config)
