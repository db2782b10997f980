"""What learns while a rack grows, and in which order things happen when a stack arrives.

What lies on the new stack's side of the trunk learns with it: final norm and head when it was
appended, the embedding when it was prepended. What lies beyond the trunk belongs to the trunk and
is frozen. A table that embedding and head share belongs to the trunk. The first stack has no trunk:
everything learns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attrs import frozen
from torch import nn

from arb_ternary.errors import UsageProblem
from arb_ternary_progressive.activation_cache import ActivationCache
from arb_ternary_progressive.hidden_codec import CacheDtype
from arb_ternary_progressive.history import Progress, StackRecord, Trunk
from arb_ternary_progressive.stack import set_learning
from arb_ternary_progressive.trunk import TrunkStream

if TYPE_CHECKING:
    from arb_ternary_progressive.builder import ProgressiveRackBuilder
    from arb_ternary_progressive.rack import Rack


@frozen(eq=False)
class Stage:
    """The training of one stack: where it is, and what learns.

    Attributes:
        rack: the rack, the new stack included.
        index: of the stack in the order of building.
        position: of the stack in the order of computation.
        trunk: ``none`` for the first stack, else the strategy.
    """

    rack: Rack
    index: int
    position: int
    trunk: Trunk

    @classmethod
    def enter(cls, builder: ProgressiveRackBuilder, strategy: Literal["frozen", "qlora"]) -> Stage:
        """Let learn what learns while the newest stack of ``builder`` is trained, and nothing else.

        Raises:
            UsageProblem: the new stack or, with ``qlora``, the trunk has nothing that could learn,
                or the new stack lies in the middle of the rack.
        """
        rack = builder.build_rack()
        stacks = rack.ordered_stacks
        newest = rack.newest
        position = rack.position(newest.stack_id)
        last = len(stacks) - 1
        if 0 < position < last:
            raise UsageProblem(
                f"rack: its newest stack, {newest.stack_id}, lies between others; it must be at an "
                f"end"
            )
        newest.set_learning("all")
        first = len(stacks) == 1
        appended = position == last
        for part in rack.input_end:
            set_learning(part, first or not appended)
        for part in _output_end(rack):
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
        """Let everything learn that can, in all stacks."""
        release(rack)
        return cls(rack, len(rack.ordered_stacks) - 1, rack.position(rack.newest.stack_id), "none")

    def record(self, progress: Progress, *, time_step: int | None, skipped: int) -> StackRecord:
        """What became of the stack.

        Args:
            progress: of its training.
            time_step: that it was trained at; None where time is an input.
            skipped: micro-batches without a finite loss or gradient.
        """
        stack = self.rack.ordered_stacks[self.position]
        return StackRecord(
            stack_id=stack.stack_id,
            index=self.index,
            position=self.position,
            blocks=len(stack.blocks),
            precision=stack.precision,
            trunk=self.trunk,
            time_step=time_step,
            skipped=skipped,
            **progress.numbers(),
        )

    @property
    def streams(self) -> str:
        """Why the trunk's hidden states cannot be cached; empty where they can."""
        if self.trunk == "none":
            return "there is no trunk yet"
        if self.trunk == "qlora":
            return "the trunk's adapters learn, so that its activations change with every step"
        if self.position == 0:
            return "the new stack lies below the trunk, which runs on what the new stack makes"
        return ""


def trunk_stream(
    stage: Stage, cache: ActivationCache | None, dtype: CacheDtype
) -> TrunkStream | None:
    """What hands the trunk's hidden states to the new stack; None where every batch runs through
    the whole rack.
    """
    if stage.streams:
        return None
    return TrunkStream(stage.rack, stage.position, cache=cache, dtype=dtype)


def release(rack: Rack) -> None:
    """Let everything learn that can, as after the growth."""
    for part in (*rack.input_end, *_output_end(rack)):
        set_learning(part, True)
    for stack in rack.ordered_stacks:
        if stack.can_learn:
            stack.set_learning("all")


def _output_end(rack: Rack) -> list[nn.Module]:
    return [rack.final_norm, rack.head]
