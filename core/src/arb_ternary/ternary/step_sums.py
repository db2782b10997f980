"""Sums of the votes and statistics of a step's micro-batches, before they reach an accumulator.

Accumulators that are clipped after every micro-batch depend on the order of micro-batches, and so
on which process computed which. Integer sums that are clipped once do not; float sums are added in
the order of micro-batches.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape
from arb_ternary.errors import UsageProblem

#: What the sums of a step hold, so that an accumulator can be added to them.
_LARGEST: Final = torch.iinfo(torch.int16).max - 128


class StepSums:
    """The sums of one module; working memory, as long as a step lasts.

    Attributes:
        votes: int16 ``[N, K]``, minus the votes that were cast; an accumulator is clipped when they
            are added to it.
        exponent_votes: int32 ``[N, J]``, likewise.
        bias: int16 ``[N]``, likewise; None for a module without a bias.
        stats: float32 ``[1 + N + K]`` of the micro-batch under way, as ``VoteState.stats``.
        magnitudes: float32 ``[N + K]`` of the micro-batch under way; None under sign votes.
        casts: of the micro-batches that have ended.
        microbatch_index: index of the current micro-batch in its step.
        awaited: casts that backward owes for the forward passes of that micro-batch; counted while
            somebody watches.
    """

    def __init__(
        self, shape: WeightShape, device: torch.device, *, bias: bool, magnitudes: bool
    ) -> None:
        rows = shape.out_features
        columns = shape.in_features
        self.votes = torch.zeros(rows, columns, dtype=torch.int16, device=device)
        self.exponent_votes = torch.zeros(rows, shape.groups, dtype=torch.int32, device=device)
        self.bias = torch.zeros(rows, dtype=torch.int16, device=device) if bias else None
        self.stats = torch.zeros(1 + rows + columns, device=device)
        self.magnitudes = torch.zeros(rows + columns, device=device) if magnitudes else None
        self.casts = 0
        self.microbatch_index = 0
        self.awaited = 0

    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def clear(self) -> None:
        """Start a step."""
        for tensor in self.tensors().values():
            tensor.zero_()
        self.casts = 0
        self.microbatch_index = 0
        self.awaited = 0

    @staticmethod
    def check(casts: int, largest_vote: int) -> None:
        """UsageProblem where so many casts of votes up to ``largest_vote`` may have been more than
        the sums hold.
        """
        if casts * largest_vote > _LARGEST:
            raise UsageProblem(
                f"{casts} casts of votes up to {largest_vote} in one step are more than sums of 16 "
                f"bits hold",
                f"Take fewer micro-batches a step (gradient_accumulation_steps), for "
                f"{_LARGEST // largest_vote} casts.",
            )
