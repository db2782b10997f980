"""The schedule that assigns the micro-batches of a step to processes.

A step has ``gradient_accumulation_steps`` micro-batches, counted from 0. The loop asks a schedule
for the indices to train on here; the schedule combines what several processes have computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import nn
from torch.optim import Optimizer

from arb_ternary.optim.protocol import inner_optimizers, may_defer
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_train.loop_state import Outcome

if TYPE_CHECKING:
    from arb_ternary_train.loop import TrainingLoop


class MicrobatchSchedule(Protocol):
    """Assigns the micro-batches of a step to processes."""

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Sequence[TernaryModule]:
        """Prepare ``model`` and ``optimizer`` between two steps; return the modules that vote.

        Raises:
            ConfigError: the optimizer cannot be used with this schedule.
        """

    def indices(self, loop: TrainingLoop, first: int, outcomes: list[Outcome]) -> Iterator[int]:
        """Yield the indices of the next micro-batches to train on in this process.

        For each index the caller runs forward and backward on the loop's next micro-batch and
        appends the outcome to ``outcomes``; then it asks for the next index, to the end.

        Args:
            loop: what trains.
            first: index of the loop's next micro-batch.
            outcomes: what became of the micro-batches of this process.

        Raises:
            CheckpointError: this schedule cannot continue at ``first``.
        """

    def gather_outcomes(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Return the outcomes of all processes, by index."""


class SequentialSchedule:
    """Trains on one micro-batch after another in one process.

    Args:
        count: micro-batches per step.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Sequence[TernaryModule]:
        """See :class:`MicrobatchSchedule`."""
        # Votes of several micro-batches are summed, as those of several processes are. An
        # optimizer that defers steps keeps and drops micro-batches itself, so votes go straight
        # into the accumulators.
        return sum_votes(model, optimizer, always=self._count > 1 and not may_defer(optimizer))

    def indices(self, loop: TrainingLoop, first: int, outcomes: list[Outcome]) -> Iterator[int]:
        """See :class:`MicrobatchSchedule`. A run can be stopped after any micro-batch."""
        yield first
        for module in loop.voters:
            module.end_microbatch()

    def gather_outcomes(self, outcomes: list[Outcome]) -> list[Outcome]:
        """See :class:`MicrobatchSchedule`."""
        return outcomes


def sum_votes(model: nn.Module, optimizer: Optimizer, *, always: bool) -> list[TernaryModule]:
    """Make modules sum their votes over a step if ``always`` or if their rule needs it.

    Modules that nothing trains allocate no sums.

    Returns:
        The modules that ``optimizer`` trains by votes.
    """
    rules = [each for each in inner_optimizers(optimizer) if isinstance(each, TernaryOptimizer)]
    voters = {module: always or rule.sums_votes for rule in rules for module in rule.modules}
    for _, module in ternary_modules(model):
        module.sum_votes(voters.get(module, False))
        module.on_backward = None
    return [*voters]
