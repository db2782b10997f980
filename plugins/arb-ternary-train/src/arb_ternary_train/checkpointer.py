"""The state of a run: collected for a checkpoint, and put back from one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import define
from torch import nn

from arb_ternary import hookspecs
from arb_ternary.errors import CheckpointError
from arb_ternary.protocols.runs import Phase, PhaseResult
from arb_ternary_train.build import build_phase
from arb_ternary_train.checkpoint import Checkpoint, CheckpointStore, Pieces
from arb_ternary_train.config import RunConfig
from arb_ternary_train.init_from import load_state
from arb_ternary_train.protocols import ModelChangingPhase
from arb_ternary_train.safetensors_file import TensorParts
from arb_ternary_train.seeding import global_rng_state, restore_global_rng

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


@define(eq=False)
class Checkpointer:
    """Writes the checkpoints of a run, each state once.

    Attributes:
        store: where they go.
        identity: what a checkpoint of this run must match; see ``arb_ternary_train.identity``.
    """

    store: CheckpointStore
    identity: Mapping[str, Any]
    _changes: int = 0
    _saved: tuple[int, Path] | None = None

    def mark_progress(self) -> None:
        """Something has changed that a checkpoint should hold."""
        self._changes += 1

    def mark_saved(self, path: Path) -> None:
        """The run stands exactly where the checkpoint ``path`` was written."""
        self._saved = (self._changes, path)

    def save(self, context: TrainingContext) -> Path:
        """Write a checkpoint and return its folder. Where nothing has happened since the last one,
        that one stands.

        Every rank calls it. Raises CheckpointError, on all of them, where rank 0 cannot write it.
        """
        stands = (
            self._saved if self._saved is not None and self._saved[0] == self._changes else None
        )
        # Only rank 0 has saved what its observers asked for.
        path = context.world.broadcast(None if stands is None else str(stands[1]))
        if path is not None:
            return Path(path)
        observed: dict[str, Any] = {}
        context.tell(hookspecs.arb_checkpoint_save, context, observed)
        phase = context.phase
        structures = list(context.structures)
        if phase is not None:
            structures.append(phase.structure() if isinstance(phase, ModelChangingPhase) else None)
        state = {
            "step": context.step,
            "tokens": context.tokens,
            "finished": [
                {"steps": result.steps, "metrics": dict(result.metrics)}
                for result in context.finished
            ],
            "phase": None if phase is None else phase.state_dict(),
            "structures": structures,
            "evaluation_shape": context.evaluation_shape,
            "unfinished_evaluation": context.unfinished_evaluation,
            "metrics_length": context.logbook.metrics.sync(),
            "rng": global_rng_state(context.device),
            "observers": observed,
        }

        def write(model: TensorParts | Pieces) -> str:
            return str(self.store.save(context.step, model, state, self.identity))

        folder = Path(context.world.save_model(context.model, context.config.ranks, write))
        self.mark_saved(folder)
        return folder


def restore_run(context: TrainingContext, checkpoint: Checkpoint) -> None:
    """Put everything back as it was when ``checkpoint`` was written, the phase that was running
    too.
    """
    state = checkpoint.state
    context.step = state["step"]
    context.tokens = state["tokens"]
    context.evaluation_shape = state["evaluation_shape"]
    context.unfinished_evaluation = state["unfinished_evaluation"]
    context.finished = [
        PhaseResult(result["steps"], result["metrics"]) for result in state["finished"]
    ]
    context.structures = list(state["structures"][: context.phase_index])
    phase = context.phase = (
        None if state["phase"] is None else build_phase(context.config, context.phase_index)
    )
    running = {} if phase is None else {context.phase_index: phase}
    context.model = restore_structures(
        context.model, checkpoint, context.config, context.device, running
    )
    load_state(context.model, checkpoint.model, str(checkpoint.path / "model.safetensors"))
    if phase is not None:
        phase.load_state_dict(state["phase"])
    restore_global_rng(state["rng"], context.device)
    context.checkpointer.mark_saved(checkpoint.path)


def restore_structures(
    model: nn.Module,
    checkpoint: Checkpoint,
    config: RunConfig,
    device: torch.device,
    running: Mapping[int, Phase] | None = None,
) -> nn.Module:
    """``model`` with the structure that the phases of ``config`` had given it when ``checkpoint``
    was written.

    Args:
        running: phases that are there already, by index; the others are built anew.

    Raises:
        CheckpointError: a phase changed the model and cannot do so again.
    """
    structures: Sequence[Mapping[str, Any] | None] = checkpoint.state["structures"]
    for index, structure in enumerate(structures):
        if structure is not None:
            phase = (running or {}).get(index) or config.phases[index].build()
            if not isinstance(phase, ModelChangingPhase):
                raise CheckpointError(
                    f"{checkpoint.path}: phases[{index}] changed the model and cannot do so again"
                )
            model = phase.restore_structure(model, structure).to(device)
    return model
