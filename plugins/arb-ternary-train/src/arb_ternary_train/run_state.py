"""The state of a run: what a checkpoint holds besides the model.

:class:`RunState` is the one place that lists it. A run collects it for a checkpoint and restores
it from one; ``arb import`` writes one for a model that no run has trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs
import torch
from attrs import define, field, frozen
from torch import nn

from arb_ternary import hookspecs
from arb_ternary.errors import CheckpointError
from arb_ternary.protocols.runs import Phase, PhaseResult
from arb_ternary_train.build import build_phase
from arb_ternary_train.checkpoint import Checkpoint, CheckpointStore, Pieces
from arb_ternary_train.config import RunConfig
from arb_ternary_train.model_state import load_state
from arb_ternary_train.protocols import ModelChangingPhase
from arb_ternary_train.safetensors_file import TensorParts
from arb_ternary_train.seeding import global_rng_state, restore_global_rng

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


@frozen(kw_only=True, eq=False)
class RunState:
    """Everything that a checkpoint stores of a run, besides the model.

    The names of the fields are the keys in ``state.json``, in this order. Values are nested dicts,
    lists and tuples of tensors, numbers, strings, booleans and None. A field that is added later
    needs a default: older checkpoints do not have it.

    Attributes:
        step: optimizer steps of the whole run.
        tokens: predictions that the run has trained on.
        finished: steps and metrics of each phase that has ended.
        phase: state of the phase that is running; None between phases.
        structures: how each phase has changed the structure of the model, the running phase
            included; None for a phase that changes nothing.
        evaluation_shape: ``(batch_size, block_size)`` of evaluations; None before the first
            training loop.
        unfinished_evaluation: number of batches (None: all) of an evaluation that is still to be
            made, in a list; None if there is none.
        metrics_length: length of the metrics file in bytes.
        rng: state of the global generators.
        observers: what the run's observers store.
    """

    step: int = 0
    tokens: int = 0
    finished: Sequence[Mapping[str, Any]] = field(factory=list)
    phase: Mapping[str, Any] | None = None
    structures: Sequence[dict[str, Any] | None] = field(factory=list)
    evaluation_shape: tuple[int, int] | None = None
    unfinished_evaluation: list[int | None] | None = None
    metrics_length: int = 0
    rng: Mapping[str, Any]
    observers: Mapping[str, Any] = field(factory=dict)

    @classmethod
    def collect(cls, context: TrainingContext, observers: Mapping[str, Any]) -> Self:
        """Return the state of a run. Tensors are those in use."""
        phase = context.phase
        finished = [
            {"steps": result.steps, "metrics": dict(result.metrics)} for result in context.finished
        ]
        structures = list(context.structures)
        if phase is not None:
            structures.append(structure_of(phase))
        return cls(
            step=context.step,
            tokens=context.tokens,
            finished=finished,
            phase=None if phase is None else phase.state_dict(),
            structures=structures,
            evaluation_shape=context.evaluation_shape,
            unfinished_evaluation=context.unfinished_evaluation,
            metrics_length=context.logbook.metrics.sync(),
            rng=global_rng_state(context.device),
            observers=observers,
        )

    def restore(self, context: TrainingContext, checkpoint: Checkpoint) -> None:
        """Restore the run of ``context``, its model and the running phase.

        Args:
            context: a run that has been built and has computed nothing.
            checkpoint: the checkpoint that has this state.
        """
        context.step = self.step
        context.tokens = self.tokens
        context.evaluation_shape = self.evaluation_shape
        context.unfinished_evaluation = self.unfinished_evaluation
        context.finished = [
            PhaseResult(result["steps"], result["metrics"]) for result in self.finished
        ]
        index = context.phase_index
        context.structures = list(self.structures[:index])

        running: dict[int, Phase] = {}
        if self.phase is not None:
            context.phase = running[index] = build_phase(context.config, index)
        context.model = restore_structures(
            context.model, checkpoint, context.config, context.device, running
        )
        load_state(context.model, checkpoint.model, str(checkpoint.path / "model.safetensors"))
        if self.phase is not None:
            running[index].load_state_dict(self.phase)
        restore_global_rng(self.rng, context.device)
        context.checkpointer.mark_saved(checkpoint.path)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a checkpoint holds it."""
        return attrs.asdict(self, recurse=False)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """Return the state in a checkpoint of a run."""
        return cls(**checkpoint.state)


@define(eq=False)
class Checkpointer:
    """Writes the checkpoints of a run, each state once.

    Attributes:
        store: where checkpoints are written.
        identity: what a checkpoint of this run must match; see ``arb_ternary_train.identity``.
    """

    store: CheckpointStore
    identity: Mapping[str, Any]
    _changes: int = 0
    _saved: tuple[int, Path] | None = None

    def mark_progress(self) -> None:
        """Note that something has changed that a checkpoint should hold."""
        self._changes += 1

    def mark_saved(self, path: Path) -> None:
        """Note that the run stands exactly where the checkpoint ``path`` was written."""
        self._saved = (self._changes, path)

    def save(self, context: TrainingContext) -> Path:
        """Write a checkpoint and return its folder.

        If nothing has happened since the last checkpoint, that one is returned. Collective.

        Raises:
            CheckpointError: rank 0 cannot write it; raised on all ranks. Or a parameter is not
                finite: checkpoints that are good are kept.
        """
        current = None
        if self._saved is not None and self._saved[0] == self._changes:
            current = str(self._saved[1])
        # Only rank 0 has saved what its observers asked for.
        path = context.world.broadcast(current)
        if path is not None:
            return Path(path)
        check_finite(context.model, context.step)

        observers: dict[str, Any] = {}
        context.tell(hookspecs.arb_checkpoint_save, context, observers)
        state = RunState.collect(context, observers).to_dict()

        def write(model: TensorParts | Pieces) -> str:
            return str(self.store.save(context.step, model, state, self.identity))

        folder = Path(context.world.save_model(context.model, context.config.ranks, write))
        self.mark_saved(folder)
        return folder


def check_finite(model: nn.Module, step: int) -> None:
    """Check that every float parameter is finite.

    Raises:
        CheckpointError: one is not.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
            raise CheckpointError(
                f"step {step}: parameter {name!r} has a value that is not finite; no checkpoint is "
                "written",
                "Earlier checkpoints are intact. Lower the learning rate, then continue from one: "
                "--resume PATH.",
            )


def structure_of(phase: Phase) -> dict[str, Any] | None:
    """Return how ``phase`` has changed the structure of the model; None if it changes nothing."""
    return phase.structure() if isinstance(phase, ModelChangingPhase) else None


def restore_structures(
    model: nn.Module,
    checkpoint: Checkpoint,
    config: RunConfig,
    device: torch.device,
    running: Mapping[int, Phase] | None = None,
) -> nn.Module:
    """Give ``model`` the structure that it had when ``checkpoint`` was written.

    Args:
        model: the model as the config describes it.
        checkpoint: a checkpoint of a run of ``config``.
        config: config of the run.
        device: device of the model.
        running: phases that have been built already, by index; others are built here.

    Raises:
        CheckpointError: a phase changed the model and cannot do so again.
    """
    for index, structure in enumerate(RunState.of(checkpoint).structures):
        if structure is None:
            continue
        phase = (running or {}).get(index) or config.phases[index].build()
        if not isinstance(phase, ModelChangingPhase):
            raise CheckpointError(
                f"{checkpoint.path}: phases[{index}] changed the model and cannot do so again"
            )
        model = phase.restore_structure(model, structure).to(device)
    return model
