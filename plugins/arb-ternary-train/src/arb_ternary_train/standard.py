"""The standard phase: end-to-end training or fine-tuning for a number of steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from arb_ternary.config.choice import Choice
from arb_ternary.config.options import non_negative, option, optional, positive
from arb_ternary.errors import ConfigError
from arb_ternary.protocols.runs import PhaseResult
from arb_ternary.specs import OptimizerSpec
from arb_ternary_train.init_from import load_weights
from arb_ternary_train.loop import StepReport, TrainingLoop
from arb_ternary_train.options import LoopOptions

if TYPE_CHECKING:
    from arb_ternary_train.context import RunContext

__all__ = ["StandardConfig", "StandardPhase", "StepAttention", "attend_to_step", "build", "refuse_two_rates"]


@frozen(kw_only=True)
class StandardConfig(LoopOptions):
    """Options of the phase ``standard``."""

    log_every: int = option(
        10, "steps between lines on the screen; the metrics file has every step", validator=positive
    )
    eval_every: int = option(200, "steps between evaluations; 0 = only at the end of the run", validator=non_negative)
    eval_batches: int | None = option(
        8, "batches of validation tokens in such an evaluation; null = all", validator=optional(positive)
    )
    init_from: str | None = option(
        None, "run directory or checkpoint whose weights the phase starts from; null = the model as it is"
    )


class StepAttention(Protocol):
    """Options of a phase: how often a step gets what attention."""

    @property
    def log_every(self) -> int: ...

    @property
    def eval_every(self) -> int: ...

    @property
    def eval_batches(self) -> int | None: ...


class StandardPhase:
    """Trains for ``config.steps`` steps.

    ``begin``, ``advance``, ``finish`` and ``close`` are ``run`` in parts, for a phase that wraps this one.
    """

    name = "standard"

    def __init__(self, config: StandardConfig) -> None:
        self.config = config
        self.loop: TrainingLoop | None = None
        self._restored: Mapping[str, Any] | None = None
        self._last_loss: float | None = None

    def run(self, context: RunContext) -> PhaseResult:
        """Train to the last step; see ``Phase``."""
        self.begin(context)
        try:
            while self.advance(context):
                pass
            return self.finish(context)
        finally:
            self.close()

    def begin(self, context: RunContext) -> None:
        """Build the loop, afresh or where ``load_state_dict`` left off."""
        refuse_two_rates(context.config.optimizer, self.config.lr, f"phases[{context.phase_index}].lr")
        if self._restored is None and self.config.init_from is not None:
            load_weights(context.model, Path(self.config.init_from), seed=context.seed)
        self.loop = TrainingLoop(context, self.config, key=f"phase {context.phase_index}")
        if self._restored is not None:
            self._last_loss = self._restored["last_loss"]
            self.loop.load_state_dict(self._restored["loop"])
            self._restored = None
        context.reporter.start(self.name, self.config.steps, self.loop.step)

    def advance(self, context: RunContext) -> bool:
        """Train on one micro-batch, then evaluate, save and stop where that is due. False after the last step."""
        loop = self._running()
        if loop.step >= self.config.steps:
            return False
        report = loop.advance()
        if report is not None:
            self._last_loss = report.loss
            attend_to_step(context, report, self.config, steps=self.config.steps)
        context.stop_if_requested()
        return loop.step < self.config.steps

    def finish(self, context: RunContext) -> PhaseResult:
        """Save, and say what was done."""
        loop = self._running()
        context.save_checkpoint()
        metrics = {"skipped": float(loop.skipped)}
        if self._last_loss is not None:
            metrics["train_loss"] = self._last_loss
        context.reporter.stop()
        return PhaseResult(steps=loop.step, metrics=metrics)

    def close(self) -> None:
        """Let go of the loop's threads."""
        if self.loop is not None:
            self.loop.close()

    def state_dict(self) -> dict[str, Any]:
        """The loop's state."""
        return {"loop": self._running().state_dict(), "last_loss": self._last_loss}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state`` when the phase begins."""
        self._restored = state

    def _running(self) -> TrainingLoop:
        if self.loop is None:
            raise RuntimeError("the standard phase has not begun")
        return self.loop


def attend_to_step(
    context: RunContext,
    report: StepReport,
    options: StepAttention,
    *,
    steps: int,
    ends_phase: bool = True,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write a step down; then evaluate and save a checkpoint where that is due.

    Args:
        context: the run.
        report: of the step.
        options: how often a step is shown, and evaluated after.
        steps: that the loop will take.
        ends_phase: whether the loop's last step is that of the phase.
        more: further numbers of the step.
    """
    last = report.step == steps
    context.record_step(
        {**report.metrics(), **more},
        tokens=report.tokens,
        phase_step=report.step,
        log=report.step % options.log_every == 0 or last,
    )
    # The end of a run has an evaluation on all validation tokens anyway.
    at_the_end = context.in_last_phase and last and ends_phase
    if options.eval_every and report.step % options.eval_every == 0 and not at_the_end:
        context.evaluate(options.eval_batches)
    context.checkpoint_if_due()


def refuse_two_rates(optimizer: Choice[Any], lr: float | None, path: str) -> None:
    """Refuse a rate of float parameters that was written in two places.

    Raises:
        ConfigError: both the phase and the optimizer of float parameters set ``lr``.
    """
    if lr is None:
        return
    nested = [
        value for name in _option_names(optimizer) if isinstance(value := getattr(optimizer.options, name), Choice)
    ]
    for choice in nested:
        refuse_two_rates(choice, lr, path)
    trains_float = isinstance(optimizer.spec, OptimizerSpec) and "float" in optimizer.spec.accepts
    if trains_float and not nested and "lr" in optimizer.given:
        raise ConfigError(
            f"{path}: the rate of float parameters is given twice: {lr} here, and {optimizer.options.lr} in the "
            f"optimizer {optimizer.name!r}",
            "Keep one of them.",
        )


def _option_names(choice: Choice[Any]) -> list[str]:
    return [attribute.name for attribute in getattr(type(choice.options), "__attrs_attrs__", ())]


def build(config: StandardConfig) -> StandardPhase:
    """The factory that the ``standard`` phase registers."""
    return StandardPhase(config)
