"""A run in progress, as its phases see it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, ParamSpec

import torch
from attrs import define, evolve, field
from torch import nn
from torch.optim import Optimizer

from arb_ternary import hookspecs
from arb_ternary.backends.select import Selection
from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.errors import ConfigError, Interrupted
from arb_ternary.optim.protocol import build_optimizer, collect_trainable
from arb_ternary.protocols.data import DataSource, MaskingStrategy
from arb_ternary.protocols.runs import Phase, PhaseResult
from arb_ternary_train.capabilities import max_length, parts_added_by
from arb_ternary_train.config import RunConfig
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.evaluate import Evaluation, block_size_of, evaluate, prediction_name
from arb_ternary_train.logbook import Logbook
from arb_ternary_train.observers import RunObservers
from arb_ternary_train.optim.factored import with_factors
from arb_ternary_train.run_state import Checkpointer, structure_of
from arb_ternary_train.signals import StopRequest
from arb_ternary_train.world import SingleProcess, World

#: The least number of predictions that the evaluation at the end of a run covers.
_LEAST_AT_END: Final = 16_384


P = ParamSpec("P")


class _EvaluationStopped(Exception):
    """The run was asked to stop while it evaluated."""


@define(eq=False, kw_only=True)
class TrainingContext:
    """The ``RunContext`` of a training run.

    Attributes:
        config: the resolved config.
        device: where the model lives.
        backend: the kernel backend, and who chose it.
        model: the model in training; a phase that changes its structure may replace it.
        data: training and held-out samples.
        masking: turns samples into inputs, targets and a loss mask.
        observers: observers of the run.
        stop: whether the run was asked to stop.
        files: where the run writes.
        logbook: metrics file, screen and speed.
        checkpointer: writes the run's checkpoints.
        step: optimizer steps taken in the whole run.
        tokens: predictions that the whole run has trained on.
        evaluation_shape: ``(batch_size, block_size)`` of evaluations, from the latest training
            loop.
        finished: results of the phases that have ended, in order.
        structures: how each phase has changed the structure of the model, in order; None for a
            phase that changed nothing.
        phase: the phase that is running, or is to go on after a resume; None between phases.
        validation: the evaluation at the end of the run, once it has been made.
        unfinished_evaluation: number of batches (None: all) of an evaluation that was deferred or
            that a stop cut short, in a list; None if there is none.
        optimizer: the optimizer that was built last.
        reporting_behind: steps that were taken together are being reported one after another.
            Until the last is reported, evaluations, checkpoints and stops are deferred, because the
            model is ahead of ``step``.
        threads_available: threads that torch had when the run began.
        world: the processes that train together.
    """

    config: RunConfig
    device: torch.device
    backend: Selection
    model: nn.Module
    data: DataSource
    masking: MaskingStrategy
    observers: RunObservers
    stop: StopRequest
    files: RunDirectory
    logbook: Logbook
    checkpointer: Checkpointer
    step: int = 0
    tokens: int = 0
    evaluation_shape: tuple[int, int] | None = None
    finished: list[PhaseResult] = field(factory=list)
    structures: list[dict[str, Any] | None] = field(factory=list)
    phase: Phase | None = None
    validation: Evaluation | None = None
    unfinished_evaluation: list[int | None] | None = None
    optimizer: Optimizer | None = None
    reporting_behind: bool = False
    _checkpoint_due: bool = False
    threads_available: int = field(factory=torch.get_num_threads)
    world: World = field(factory=SingleProcess)

    @property
    def directory(self) -> Path:
        """The directory that the run writes to."""
        return self.files.path

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config.seed

    @property
    def vocabulary_size(self) -> int:
        """Number of ids that a prediction chooses among."""
        return self.data.vocabulary_size

    @property
    def phase_index(self) -> int:
        """Position of the current phase in the config's list: how many phases have ended."""
        return len(self.finished)

    @property
    def in_last_phase(self) -> bool:
        """Whether no phase follows the current one."""
        return self.phase_index == len(self.config.phases) - 1

    @property
    def phase_name(self) -> str:
        """Name of the current phase; empty between phases."""
        return "" if self.phase is None else self.phase.name

    def make_optimizer(
        self,
        choice: OptimizerChoice | None = None,
        factors: Mapping[str, float] = MappingProxyType({}),
    ) -> Optimizer:
        """Build an optimizer over everything in the model that can be trained now.

        Args:
            choice: the optimizer; None = the config's.
            factors: factors on the rates of parts, by name.

        Raises:
            ConfigError: the model has parts that the optimizer cannot train.
        """
        later = parts_added_by(self.config.phases[self.phase_index :])
        trainable = evolve(collect_trainable(self.model), later=later)
        if not trainable.parts:
            raise ConfigError("model: nothing in it can be trained; every part is frozen")
        wanted = with_factors(choice or self.config.optimizer, factors)
        self.optimizer = build_optimizer("optimizer", wanted, trainable)
        return self.optimizer

    def note(self, text: str) -> None:
        """Show and log a line that stays."""
        self.logbook.reporter.note(text)

    # --- stopping and saving

    @property
    def stop_requested(self) -> bool:
        """Whether a signal or an observer asked the run to stop, on any rank. Collective."""
        reason = self.world.stop_reason(self.stop.reason)
        if reason:
            self.stop.set(reason)
        return bool(reason)

    def request_stop(self, reason: str) -> None:
        """Make the run save a checkpoint and end, as a signal would."""
        self.stop.set(reason)

    def stop_if_requested(self) -> None:
        """Save a checkpoint and raise Interrupted if the run was asked to stop.

        Raises:
            Interrupted: the run was asked to stop; the checkpoint has been written.
        """
        if self.stop_requested and not self.reporting_behind:
            path = self.checkpointer.save(self)
            raise Interrupted(
                f"{self.directory}: stopped by {self.stop.reason} after step {self.step}; saved "
                f"{path.name}",
                f"Continue with: arb train {self.files.config_file} --run-dir {self.directory} "
                f"--resume",
            )

    def checkpoint_if_due(self) -> None:
        """Write a checkpoint if the number of steps is a multiple of ``checkpoint.every``."""
        every = self.config.checkpoint.every
        self._checkpoint_due |= bool(every) and self.step % every == 0
        if self._checkpoint_due and not self.reporting_behind:
            self._checkpoint_due = False
            self.save_checkpoint()

    def save_checkpoint(self) -> None:
        """Write a checkpoint, unless ``checkpoint.every`` is 0 or nothing has changed since."""
        if self.config.checkpoint.every:
            self.checkpointer.save(self)

    # --- phases

    def enter_phase(self, phase: Phase) -> None:
        """Note and announce that ``phase`` is about to run."""
        self.phase = phase
        self.tell(hookspecs.arb_phase_start, self, phase.name)

    def leave_phase(self, phase: Phase, result: PhaseResult) -> None:
        """Note and announce that ``phase`` has ended with ``result``."""
        self.flush_deferred()
        self.structures.append(structure_of(phase))
        self.finished.append(result)
        self.phase = None
        self.mark_progress()
        self.tell(hookspecs.arb_phase_end, self, phase.name)

    # --- what rank 0 does alone

    @contextmanager
    def main_process_only(self) -> Iterator[None]:
        """Act alone within a ``with`` block, which then concerns no other rank."""
        world = self.world
        self.world = SingleProcess(self.device)
        try:
            with world.main_process_only():
                yield
        finally:
            self.world = world

    def tell(self, hook: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a hook of the run's observers, which only rank 0 has.

        Raises:
            ArbError: an observer failed; it is named.
        """
        with self.main_process_only():
            self.observers.call(hook, *args, **kwargs)

    # --- what happened

    def mark_progress(self) -> None:
        """Note that something has changed that a checkpoint should hold."""
        self.checkpointer.mark_progress()

    def record(self, event: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Write one line of the metrics file and return it. No value may depend on the clock."""
        record = {"event": event, "step": self.step, "phase": self.phase_name, **values}
        self.logbook.metrics.write(record)
        return record

    def record_step(
        self, metrics: Mapping[str, Any], *, tokens: int, phase_step: int, log: bool
    ) -> None:
        """Count an optimizer step, record it, and report it to observers and on the screen.

        Args:
            metrics: numbers of the step. None may depend on the clock; observers also get
                ``tokens_per_second`` and ``time``.
            tokens: predictions that the step trained on.
            phase_step: steps that the phase has taken.
            log: whether the step deserves a lasting line on the screen.
        """
        self.step += 1
        self.tokens += tokens
        self.validation = None
        self.mark_progress()
        record = self.record("train", {**metrics, "tokens": self.tokens})
        speed = {"tokens_per_second": self.logbook.tokens_per_second, "time": time.time()}
        self.tell(hookspecs.arb_step_end, self, self.step, {**record, **speed})
        self.logbook.show_step(phase_step, metrics, log)

    def record_skip(self, what: str, value: float, microbatch: int) -> None:
        """Record that a micro-batch of the next step was dropped: its ``what`` is ``value``."""
        self.mark_progress()
        self.record(
            "skip",
            {"step": self.step + 1, "micro_batch": microbatch, "what": what, "value": value},
        )
        self.note(f"step {self.step + 1}: micro-batch {microbatch} skipped, its {what} is {value}")

    def evaluate(self, batches: int | None = None) -> Evaluation:
        """Evaluate on ``batches`` batches of held-out samples (None: all), and record the result.

        Raises:
            Interrupted: the run was asked to stop meanwhile; a checkpoint has been written, and a
                resumed run repeats the evaluation.
        """
        batch_size, block_size = self.shape_to_evaluate
        self.unfinished_evaluation = [batches]
        try:
            result = evaluate(
                self.model,
                self.data,
                self.masking,
                batch_size=batch_size,
                block_size=block_size,
                batches=batches,
                seed=self.seed,
                device=self.device,
                step=self.step,
                after_batch=self._after_evaluated_batch,
                world=self.world,
            )
        except _EvaluationStopped:
            self.stop_if_requested()
            raise
        self.unfinished_evaluation = None
        self.mark_progress()
        record = self.record(
            "validation", {"loss": result.loss, "tokens": result.tokens, **result.metrics}
        )
        self.tell(hookspecs.arb_eval_end, self, self.step, record)
        self.note(f"step {self.step}: {result.describe(prediction_name(self.data))}")
        return result

    @property
    def shape_to_evaluate(self) -> tuple[int, int]:
        """Samples per batch and predictions per sample in evaluations."""
        return self.evaluation_shape or default_evaluation_shape(self.model, self.data)

    def _after_evaluated_batch(self, done: int) -> None:
        """Show progress, and stop if the run was asked to."""
        self.logbook.reporter.evaluating(done)
        if self.stop_requested:
            raise _EvaluationStopped

    def evaluate_or_defer(self, batches: int | None = None) -> None:
        """Evaluate now, or when all steps are reported if the run is reporting behind."""
        self.unfinished_evaluation = [batches]
        if not self.reporting_behind:
            self.finish_evaluation()

    def flush_deferred(self) -> None:
        """Make the evaluation and the checkpoint that were deferred, before the next step."""
        self.finish_evaluation()
        if self._checkpoint_due:
            self._checkpoint_due = False
            self.save_checkpoint()

    def finish_evaluation(self) -> None:
        """Make the evaluation that was deferred, or that a stop cut short, before the next step."""
        if self.unfinished_evaluation is not None:
            self.evaluate(*self.unfinished_evaluation)

    def evaluate_at_end(self) -> Evaluation:
        """Evaluate on as many predictions as the run was trained on, at least 16,384."""
        self.validation = self.evaluate(self.batches_at_end)
        return self.validation

    @property
    def batches_at_end(self) -> int:
        """Largest number of batches in the evaluation at the end."""
        batch_size, block_size = self.shape_to_evaluate
        return math.ceil(max(self.tokens, _LEAST_AT_END) / (batch_size * block_size))

    def held_out_loss(self) -> float:
        """Return the held-out loss at the end of the run; see :meth:`evaluate_at_end`."""
        return (self.validation or self.evaluate_at_end()).loss


def default_evaluation_shape(model: nn.Module, data: DataSource) -> tuple[int, int]:
    """Return ``(batch_size, block_size)`` for a model that no training loop has seen.

    It is the whole context of the model, up to 1,024, 16 samples at a time.
    """
    longest = max_length(model)
    return 16, block_size_of(data, 128 if longest is None else min(longest, 1024))
