"""What a phase, an observer and a check see of the run that they are part of."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from torch import nn
from torch.optim import Optimizer

from arb_ternary import hookspecs
from arb_ternary.backends.select import Selection
from arb_ternary.errors import ConfigError, Interrupted
from arb_ternary.optim.protocol import collect_trainable, require_accepted
from arb_ternary.plugins.observers import RunObservers
from arb_ternary.protocols.data import DataSource, MaskingStrategy
from arb_ternary.protocols.runs import ModelChangingPhase, Phase, PhaseResult
from arb_ternary_train.checkpoint import CheckpointStore
from arb_ternary_train.config import RunConfig
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.evaluate import Evaluation, evaluate
from arb_ternary_train.metrics import MetricsWriter
from arb_ternary_train.progress import Reporter
from arb_ternary_train.seeding import global_rng_state
from arb_ternary_train.signals import StopRequest

__all__ = ["RunContext", "default_evaluation_shape"]

#: Steps over which the speed on display is averaged.
_WINDOW = 50


@define(eq=False, kw_only=True)
class RunContext:
    """A run in progress.

    Attributes:
        config: the resolved config.
        directory: where the run writes.
        device: where the model lives.
        backend: the kernel backend, and who chose it.
        model: the model in training; a phase that changes its structure may put another in its place.
        data: training and validation tokens.
        masking: turns samples into inputs, targets and a loss mask.
        observers: what watches the run.
        metrics: the metrics file.
        reporter: what a person sees.
        stop: whether somebody asked the run to stop.
        store: the run's checkpoints.
        identity: what a checkpoint of this run must match; see ``arb_ternary_train.identity``.
        step: optimizer steps taken in the whole run.
        tokens: tokens trained on in the whole run.
        evaluation_shape: ``(batch_size, block_size)`` of evaluations: those of the latest training loop.
        finished: results of the phases that have ended, in order.
        structures: what each phase has made of the model's structure, in order; None where it changed nothing.
        validation: the last evaluation on all validation tokens.
    """

    config: RunConfig
    directory: RunDirectory
    device: torch.device
    backend: Selection
    model: nn.Module
    data: DataSource
    masking: MaskingStrategy
    observers: RunObservers
    metrics: MetricsWriter
    reporter: Reporter
    stop: StopRequest
    store: CheckpointStore
    identity: Mapping[str, Any]
    step: int = 0
    tokens: int = 0
    evaluation_shape: tuple[int, int] | None = None
    finished: list[PhaseResult] = field(factory=list)
    structures: list[dict[str, Any] | None] = field(factory=list)
    validation: Evaluation | None = None
    optimizer: Optimizer | None = None
    train_seconds: float = 0.0
    train_tokens: int = 0
    _phase: Phase | None = None
    _recent: deque[tuple[int, float]] = field(factory=lambda: deque(maxlen=_WINDOW))
    _activity: int = 0
    _saved: tuple[int, Path] | None = None

    # --- what the run is ---

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config.seed

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return self.data.tokenizer.vocabulary_size

    @property
    def phase_index(self) -> int:
        """Position of the current phase in the config's list; the number of phases that have ended."""
        return len(self.finished)

    @property
    def in_last_phase(self) -> bool:
        """Whether no phase follows the current one."""
        return self.phase_index == len(self.config.phases) - 1

    @property
    def phase_name(self) -> str:
        """Name of the current phase; empty between phases."""
        return self._phase.name if self._phase is not None else ""

    def trains_ternary_modules(self) -> bool:
        """Whether the model has ternary modules, or others with integer weights, that learn."""
        trainable = collect_trainable(self.model)
        return bool(trainable.ternary or trainable.stored)

    def make_optimizer(self) -> Optimizer:
        """The config's optimizer over everything in the model that can be trained now.

        Raises:
            ConfigError: the model has parts that the optimizer cannot train.
        """
        choice, trainable = self.config.optimizer, collect_trainable(self.model)
        require_accepted("optimizer", choice.name, getattr(choice.spec, "accepts", ("ternary", "float")), trainable)
        if not trainable.parts:
            raise ConfigError("model: nothing in it can be trained; every part is frozen")
        self.optimizer = choice.build(trainable)
        return self.optimizer

    # --- stopping and saving ---

    @property
    def stop_requested(self) -> bool:
        """Whether a signal or an observer asked the run to stop."""
        return self.stop.requested

    def stop_if_requested(self) -> None:
        """Save a checkpoint and leave, if somebody asked for it.

        Raises:
            Interrupted: the run was asked to stop; the checkpoint has been written.
        """
        if self.stop.requested:
            path = self.save_checkpoint()
            raise Interrupted(
                f"{self.directory.path}: stopped by {self.stop.reason} after step {self.step}; saved {path.name}",
                f"Continue with: arb train {self.directory.config_file} --run-dir {self.directory.path} --resume",
            )

    def checkpoint_if_due(self) -> None:
        """Write a checkpoint when the number of steps is a multiple of ``checkpoint.every``."""
        every = self.config.checkpoint.every
        if every and self.step % every == 0:
            self.save_checkpoint()

    def save_checkpoint(self) -> Path:
        """Write a checkpoint and return its folder. Where nothing has happened since the last one, that one stands."""
        if self._saved is not None and self._saved[0] == self._activity:
            return self._saved[1]
        observed: dict[str, Any] = {}
        self.observers.call(hookspecs.arb_checkpoint_save, self, observed)
        phase = self._phase
        structures = list(self.structures)
        if phase is not None:
            structures.append(phase.structure() if isinstance(phase, ModelChangingPhase) else None)
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "finished": [{"steps": result.steps, "metrics": dict(result.metrics)} for result in self.finished],
            "phase": None if phase is None else phase.state_dict(),
            "structures": structures,
            "evaluation_shape": self.evaluation_shape,
            "metrics_length": self.metrics.sync(),
            "rng": global_rng_state(self.device),
            "observers": observed,
        }
        path = self.store.save(self.step, self.model.state_dict(), state, self.identity)
        self._saved = (self._activity, path)
        return path

    def saved_as(self, path: Path) -> None:
        """The run stands exactly where the checkpoint ``path`` was written."""
        self._saved = (self._activity, path)

    # --- phases ---

    def enter_phase(self, phase: Phase) -> None:
        """``phase`` is about to run."""
        self._phase = phase

    def leave_phase(self, phase: Phase, result: PhaseResult) -> None:
        """``phase`` has run."""
        self.structures.append(phase.structure() if isinstance(phase, ModelChangingPhase) else None)
        self.finished.append(result)
        self._phase = None
        self.mark_progress()

    # --- what happened ---

    def mark_progress(self) -> None:
        """Something has changed that a checkpoint should hold."""
        self._activity += 1

    def count_training(self, tokens: int, seconds: float) -> None:
        """``tokens`` have been trained on, which took ``seconds``."""
        self.train_tokens += tokens
        self.train_seconds += seconds
        self._recent.append((tokens, seconds))

    @property
    def tokens_per_second(self) -> float:
        """Recent speed of training, evaluations and checkpoints not counted."""
        seconds = sum(taken for _, taken in self._recent)
        return sum(tokens for tokens, _ in self._recent) / seconds if seconds else 0.0

    def record_step(self, metrics: Mapping[str, Any], *, tokens: int, phase_step: int, log: bool) -> None:
        """One optimizer step has been taken: count it, write it down, tell observers and the person who watches.

        Args:
            metrics: its numbers; none may depend on the clock (observers also get ``tokens_per_second`` and ``time``).
            tokens: tokens that the step trained on.
            phase_step: steps that the phase has taken.
            log: whether the step deserves a lasting line on the screen.
        """
        self.step += 1
        self.tokens += tokens
        self.mark_progress()
        record = {"event": "train", "step": self.step, "phase": self.phase_name, **metrics, "tokens": self.tokens}
        self.metrics.write(record)
        speed = {"tokens_per_second": self.tokens_per_second}
        self.observers.call(hookspecs.arb_step_end, self, self.step, {**record, **speed, "time": time.time()})
        known = {"loss", "flips", "lr", "rate", "grad_norm", "exponent_moves", "draws"}
        shown = {key: metrics[key] for key in ("loss", "flips", "lr", "rate", "grad_norm") if key in metrics}
        if metrics.get("draws", 1) != 1:
            shown["draws"] = metrics["draws"]
        shown.update((key, value) for key, value in metrics.items() if key not in known)
        self.reporter.step(phase_step, {**shown, "tok/s": round(self.tokens_per_second)}, log)

    def record_skip(self, what: str, value: float, micro_batch: int) -> None:
        """A micro-batch was dropped while step ``self.step + 1`` was under way: its ``what`` was ``value``."""
        self.mark_progress()
        self.metrics.write(
            {
                "event": "skip",
                "step": self.step + 1,
                "phase": self.phase_name,
                "micro_batch": micro_batch,
                "what": what,
                "value": value,
            }
        )
        self.reporter.note(f"step {self.step + 1}: micro-batch {micro_batch} skipped, its {what} is {value}")

    def evaluate(self, batches: int | None = None) -> Evaluation:
        """Loss on ``batches`` batches of validation tokens (None: all), written down and told to observers."""
        batch_size, block_size = self.evaluation_shape or default_evaluation_shape(self.model)
        result = evaluate(
            self.model,
            self.data.validation,
            self.masking,
            block_size=block_size,
            batch_size=batch_size,
            batches=batches,
            seed=self.seed,
            vocabulary_size=self.vocabulary_size,
            device=self.device,
            step=self.step,
        )
        if batches is None:
            self.validation = result
        self.mark_progress()
        record = {
            "event": "validation",
            "step": self.step,
            "phase": self.phase_name,
            "loss": result.loss,
            "tokens": result.tokens,
        }
        self.metrics.write(record)
        self.observers.call(hookspecs.arb_eval_end, self, self.step, record)
        self.reporter.note(f"step {self.step}: validation loss {result.loss:.4f} over {result.tokens:,} tokens")
        return result


def default_evaluation_shape(model: nn.Module) -> tuple[int, int]:
    """``(batch_size, block_size)`` for a model that no training loop has seen: its whole context, 16 at a time."""
    return 16, min(int(getattr(model, "max_length", 128)), 1024)
