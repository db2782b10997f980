"""Freeze and release the parts of a rack while it grows.

The end of the model on the new stack's side of the trunk learns with the new stack: final norm and
head if it was appended, the embedding if it was prepended. The other end belongs to the trunk and
is frozen. A table that embedding and head share belongs to the trunk. The first stack has no trunk:
everything learns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from arb_ternary.errors import UsageProblem
from arb_ternary_progressive.config import TrunkStrategy
from arb_ternary_progressive.history import Progress, StackRecord, Trunk
from arb_ternary_progressive.stack import Stack, set_learning
from arb_ternary_progressive.trunk import TrunkStream
from arb_ternary_train.activation_cache import ActivationCache, CacheDtype

if TYPE_CHECKING:
    from arb_ternary_progressive.builder import ProgressiveRackBuilder
    from arb_ternary_progressive.rack import Rack


@frozen(eq=False)
class Stage:
    """The training of one stack: where the stack is, and what learns.

    Attributes:
        rack: the rack, the new stack included.
        index: index of the stack in the order of building.
        position: place of the stack in the order of computation.
        trunk: ``none`` for the first stack, else the strategy.
    """

    rack: Rack
    index: int
    position: int
    trunk: Trunk

    @classmethod
    def enter(cls, builder: ProgressiveRackBuilder, strategy: TrunkStrategy) -> Stage:
        """Prepare to train the newest stack of ``builder``: freeze everything that does not learn.

        Raises:
            UsageProblem: the new stack or, with ``qlora``, the trunk has nothing that could learn,
                or the new stack lies in the middle of the rack.
        """
        rack = builder.build_rack()
        newest = rack.newest
        position = rack.position(newest.stack_id)
        last = len(rack.ordered_stacks) - 1
        if 0 < position < last:
            raise UsageProblem(
                f"rack: its newest stack, {newest.stack_id}, lies between others; it must be at an "
                "end"
            )

        newest.set_learning("all")
        first = last == 0
        appended = position == last
        for part in rack.input_end:
            set_learning(part, first or not appended)
        for part in rack.output_end:
            set_learning(part, first or appended)
        if rack.config.tied:
            set_learning(rack.embedding, first)

        if first:
            return cls(rack, 0, 0, "none")
        if strategy == "frozen":
            builder.freeze_trunk()
        else:
            builder.freeze_all_but_qlora()
        return cls(rack, last, position, strategy)

    @classmethod
    def whole(cls, rack: Rack) -> Stage:
        """Prepare to train all stacks at once."""
        release(rack)
        return cls(rack, len(rack.ordered_stacks) - 1, rack.position(rack.newest.stack_id), "none")

    @property
    def stack(self) -> Stack:
        """The stack in training."""
        return self.rack.ordered_stacks[self.position]

    def record(self, progress: Progress, *, time_step: int | None, skipped: int) -> StackRecord:
        """Return the record of the stack.

        Args:
            progress: totals of its training.
            time_step: time step that it was trained at; None if time is an input.
            skipped: micro-batches without a finite loss or gradient.
        """
        return StackRecord(
            stack_id=self.stack.stack_id,
            index=self.index,
            position=self.position,
            blocks=len(self.stack.blocks),
            precision=self.stack.precision,
            trunk=self.trunk,
            time_step=time_step,
            steps=progress.steps,
            tokens=progress.tokens,
            first_loss=progress.first_loss,
            last_loss=progress.last_loss,
            mean_loss=progress.mean_loss,
            skipped=skipped,
        )

    @property
    def uncacheable(self) -> str:
        """The reason why the trunk's hidden states cannot be cached; empty if they can."""
        if self.trunk == "none":
            return "there is no trunk yet"
        if self.trunk == "qlora":
            return "the trunk's adapters learn, so that its activations change with every step"
        if self.position == 0:
            return "the new stack lies below the trunk, which runs on what the new stack makes"
        return ""

    def trunk_stream(self, cache: ActivationCache | None, dtype: CacheDtype) -> TrunkStream | None:
        """Return the source of the trunk's hidden states.

        It is None if every batch has to run through the whole rack.
        """
        if self.uncacheable:
            return None
        return TrunkStream(self.rack, self.position, cache=cache, dtype=dtype)


def release(rack: Rack) -> None:
    """Let everything learn that can, as after the growth."""
    for part in (*rack.input_end, *rack.output_end):
        set_learning(part, True)
    for stack in rack.ordered_stacks:
        if stack.can_learn:
            stack.set_learning("all")
