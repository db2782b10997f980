"""The schedule that assigns the micro-batches of a step to processes.

A step has ``gradient_accumulation_steps`` micro-batches, counted from 0. The loop asks a schedule
for the indices to train on here; the schedule combines what several processes have computed.

A step of several micro-batches is the step of one batch: its gradient is that of the mean over all
their predictions. Votes are cast in backward, so the weight of a micro-batch has to be known before
the first backward pass. Therefore all micro-batches of a step are drawn before that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from arb_ternary.optim.protocol import inner_optimizers, may_defer
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.protocols.data import Batch, MaskedBatch
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_train.loop_state import Outcome

if TYPE_CHECKING:
    from arb_ternary_train.loop import TrainingLoop


@frozen(eq=False)
class DrawnMicrobatch:
    """A micro-batch that was read and masked, on the host.

    Attributes:
        number: micro-batches of the loop before it.
        position: state of the batches before it was read.
        continues: whether it continues the batch before it, so that a model may keep its state.
        batch: as it was read.
        masked: what the masking made of it.
        predictions: predictions that its loss is the mean of.
    """

    number: int
    position: Mapping[str, Any]
    continues: bool
    batch: Batch
    masked: MaskedBatch
    predictions: int

    def weigh(self, loss: Tensor, total: int) -> Tensor:
        """Return the part of its mean ``loss`` in the mean over ``total`` predictions."""
        if not self.predictions:
            return loss * 0.0
        return loss / (total / self.predictions)


class MicrobatchSchedule(Protocol):
    """Assigns the micro-batches of a step to processes."""

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Sequence[TernaryModule]:
        """Prepare ``model`` and ``optimizer`` between two steps; return the modules that vote.

        Raises:
            ConfigError: the optimizer cannot be used with this schedule.
        """

    def draw(self, loop: TrainingLoop, first: int) -> int:
        """Have ``loop`` draw the micro-batches of this process, up to the next optimizer step.

        Args:
            loop: what trains.
            first: index of the loop's next micro-batch.

        Returns:
            The predictions of these micro-batches in all processes, and of those trained on since
            the last call of ``optimizer.step``.

        Raises:
            CheckpointError: this schedule cannot continue at ``first``.
        """

    def indices(self, loop: TrainingLoop, first: int, outcomes: list[Outcome]) -> Iterator[int]:
        """Yield the indices of the next drawn micro-batches to train on in this process.

        For each index the caller runs forward and backward on the loop's next micro-batch and
        appends the outcome to ``outcomes``; then it asks for the next index, to the end.

        Args:
            loop: what trains.
            first: index of the loop's next micro-batch.
            outcomes: what became of the micro-batches of this process.
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

    def draw(self, loop: TrainingLoop, first: int) -> int:
        """See :class:`MicrobatchSchedule`."""
        in_flight = loop.in_flight
        if not loop.drawn:
            for ahead in range(self._count - in_flight.accumulated):
                loop.draw_microbatch(loop.microbatches + ahead)
        return in_flight.predictions + sum(drawn.predictions for drawn in loop.drawn)

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
