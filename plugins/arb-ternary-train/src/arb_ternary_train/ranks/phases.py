"""How a phase runs on several ranks: together where it deals micro-batches, on rank 0 alone where
it does not.

A phase without a training loop, such as one that reads a teacher or measures the model, runs as in
one process, on rank 0; the other ranks wait and are given the model that it leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from arb_ternary.protocols.runs import Phase, PhaseResult
from arb_ternary_train.init_from import load_state
from arb_ternary_train.model_state import ModelState
from arb_ternary_train.ranks.exchange import all_rows

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


def deals(options: Any) -> bool:
    """Whether a phase of such ``options`` trains on micro-batches, which ranks can be dealt."""
    return getattr(options, "gradient_accumulation_steps", None) is not None


def runs_together(context: TrainingContext) -> bool:
    """Whether every rank runs the phase that the run has come to."""
    return context.world.size == 1 or deals(context.config.phases[context.phase_index].options)


def run_on_main(context: TrainingContext, phase: Phase) -> PhaseResult:
    """What ``phase.run(context)`` returns on rank 0, which alone runs it; all get its model.
    Collective.
    """
    all_rows(context.model)

    def alone() -> PhaseResult:
        with context.apart():
            return phase.run(context)

    result: PhaseResult = context.world.from_main(alone)
    _share_model(context)
    # Evaluations and checkpoints follow from these, and all ranks make them together.
    context.step, context.tokens, context.evaluation_shape = context.world.share(
        (context.step, context.tokens, context.evaluation_shape)
    )
    return result


def _share_model(context: TrainingContext) -> None:
    """Give every rank the model of rank 0, which has the same names."""
    world = context.world
    model = context.model
    if world.is_main:
        for part in ModelState(model).parts():
            world.share(dict(part))
        world.share(None)
        return
    tensors: dict[str, Tensor] = {}
    while (received := world.share(None)) is not None:
        tensors.update(received)
    load_state(model, tensors, "rank 0")
