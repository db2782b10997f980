"""Sums of the votes and statistics of the micro-batches of a step.

Accumulators that are clipped after every micro-batch depend on the order of micro-batches, and so
on which process computed which. Integer sums that are clipped once do not. Float sums are added in
the order of micro-batches.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape
from arb_ternary.errors import UsageProblem

#: Largest sum of a step to which an accumulator can be added in 16 bits.
_LARGEST: Final = torch.iinfo(torch.int16).max - 128


class StepSums:
    """The sums of one module; working memory of one step.

    Attributes:
        votes: int16 ``[N, K]``, minus the votes that were cast.
        exponent_votes: int32 ``[N, J]``, minus the votes for exponents.
        bias: int16 ``[N]``, minus the votes for the bias; None for a module without a bias.
        stats: ``VoteState.stats`` of the current micro-batch.
        magnitudes: ``VoteState.magnitudes`` of the current micro-batch; None under sign votes.
        casts: number of casts in the micro-batches that have ended.
        microbatch_index: index of the current micro-batch in its step.
        awaited: casts that backward still has to make for the forward passes of that micro-batch;
            counted if ``VoteMemory.on_backward`` is set.
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
        """Return the tensors that exist, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def clear(self) -> None:
        """Zero the sums for the next step."""
        for tensor in self.tensors().values():
            tensor.zero_()
        self.casts = 0
        self.microbatch_index = 0
        self.awaited = 0

    @staticmethod
    def check(casts: int, largest_vote: int) -> None:
        """Refuse ``casts`` casts of votes up to ``largest_vote`` if the sums may overflow.

        Raises:
            UsageProblem: they may.
        """
        if casts * largest_vote > _LARGEST:
            raise UsageProblem(
                f"{casts} casts of votes up to {largest_vote} in one step are more than sums of 16 "
                f"bits hold",
                f"Take fewer micro-batches per step (gradient_accumulation_steps), for "
                f"{_LARGEST // largest_vote} casts.",
            )
