"""The sums of a step of which a rank keeps its own rows, and has the others from a cast to the
moment they are sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arb_ternary.ternary.module import TernaryModule
from arb_ternary.ternary.step_sums import StepSums


class RowSums(StepSums):
    """As ``StepSums``, whose matrices of all rows, ``votes`` and ``exponent_votes``, have memory
    only now and then.

    A state that an op was given in forward names them, so they stay the same tensors: with memory
    of their own from :meth:`hold` to :meth:`release`, and of one element else, which nothing can be
    written to (RuntimeError).

    Args:
        module: whose sums they are; it has others so far, which are dropped.
        rows: those of this rank.
        size: how many ranks there are.

    Attributes:
        rows: as given.
        own_votes: int16 ``[n, K]`` of own rows, which all ranks have sent since the step began.
        own_exponent_votes: int32 ``[n, J]``, likewise; None where the exponents do not learn.
        sent: casts of this rank that have been sent.
        casts_of: of each rank, the casts that have been sent.
    """

    def __init__(self, module: TernaryModule, rows: slice, size: int) -> None:
        bias = getattr(module, "bias_votes", None) is not None
        scaled = module.magnitudes is not None
        super().__init__(module.shape, module.weight.device, bias=bias, magnitudes=scaled)
        self.rows = rows
        self.own_votes = torch.zeros_like(self.votes[rows])
        learned = module.voting_exponents() is not None
        self.own_exponent_votes = torch.zeros_like(self.exponent_votes[rows]) if learned else None
        self.sent = 0
        self.casts_of = [0] * size
        self.release()

    @property
    def held(self) -> bool:
        """Whether the matrices of all rows have memory."""
        return self.votes.is_contiguous()

    def hold(self) -> None:
        """Give the matrices of all rows memory, zeros, unless they have it: votes are about to be
        cast.
        """
        if not self.held:
            _give(self.votes)
            if self.own_exponent_votes is not None:
                _give(self.exponent_votes)

    def show_own_exponents(self) -> None:
        """Have ``exponent_votes`` hold those of own rows, up to :meth:`release`; 0 where they do
        not learn.
        """
        if self.own_exponent_votes is not None:
            _give(self.exponent_votes)
            self.exponent_votes[self.rows] = self.own_exponent_votes

    def release(self) -> None:
        """Give that memory back."""
        for matrix in (self.votes, self.exponent_votes):
            one = torch.zeros(1, dtype=matrix.dtype, device=matrix.device)
            matrix.set_(one.untyped_storage(), 0, matrix.shape, (0, 0))

    def tensors(self) -> dict[str, Tensor]:
        """Those that there are just now, by name."""
        return {
            name: tensor for name, tensor in super().tensors().items() if tensor.is_contiguous()
        }

    def clear(self) -> None:
        """Start a step."""
        self.release()
        super().clear()
        self.sent, self.casts_of = 0, [0] * len(self.casts_of)


def _give(matrix: Tensor) -> None:
    matrix.set_(torch.zeros(matrix.shape, dtype=matrix.dtype, device=matrix.device))  # type: ignore[call-overload]
