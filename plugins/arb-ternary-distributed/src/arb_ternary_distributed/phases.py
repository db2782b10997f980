"""Phases that rank 0 runs alone.

A phase without micro-batches, such as one that reads a teacher or measures the model, runs as in
one process, on rank 0; the other ranks wait and receive the model that it leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from arb_ternary.protocols.runs import Phase, PhaseResult
from arb_ternary_distributed.exchange import gather_rows
from arb_ternary_train.init_from import load_state
from arb_ternary_train.model_state import ModelState

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup
    from arb_ternary_train.context import TrainingContext


def run_phase_on_main(world: ProcessGroup, phase: Phase, context: TrainingContext) -> PhaseResult:
    """Run ``phase`` on rank 0 and give every rank the model that it leaves. Collective."""
    gather_rows(context.model)

    def run_alone() -> PhaseResult:
        with context.main_process_only():
            return phase.run(context)

    result: PhaseResult = world.run_on_main(run_alone)
    _broadcast_model(world, context.model)
    # Evaluations and checkpoints follow from these, and all ranks make them together.
    context.step, context.tokens, context.evaluation_shape = world.broadcast(
        (context.step, context.tokens, context.evaluation_shape)
    )
    return result


def _broadcast_model(world: ProcessGroup, model: nn.Module) -> None:
    """Give every rank the model of rank 0, which has the same names."""
    if world.is_main:
        for part in ModelState(model).parts():
            world.broadcast(dict(part))
        world.broadcast(None)
        return
    tensors: dict[str, Tensor] = {}
    while (received := world.broadcast(None)) is not None:
        tensors.update(received)
    load_state(model, tensors, "rank 0")
