"""Vectors of numbers around 1 that are means of trits, and the norm whose gains are one.

A gain or a factor of a row is to move in small steps, which one trit with a power of two cannot:
its next values are half, twice and nothing. A mean of trits can, and it learns by votes as any
other ternary weight, so that a model with such vectors has no float parameter.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.ternary.module import TernaryModule, VoteOptions
from arb_ternary_text.models.config import VECTOR_TRITS
from arb_ternary_text.models.rms_norm import OwnEps, RMSNorm

# : Accumulators at birth reach from this to its opposite: one less than what flips a trit of the
# strictest rule.
_FURTHEST: Final = 31


class TritVector(TernaryModule):
    """``v[n] = 1 + sum_d T[n, d] / D``: numbers from 0 to 2 in steps of ``1 / D``, exact in
    bfloat16.

    It is the sum over each row of the ternary matrix ``[N, D]`` with exponents ``-log2(D)``. All
    trits of a number have the same gradient, and would all turn at once: their accumulators are
    spread at birth. These have 8 bits, whatever those of the matrices beside it.

    Args:
        features: ``N``.
        trits: ``D`` of each number, one of :data:`VECTOR_TRITS`; all are 0 at birth.
        gradients, backend: as of every ternary module.
    """

    # : A number that all trits move at once would move eight times as fast as AdamW moves a gain at
    # its usual rates.
    rate_factor = 1 / 8

    def __init__(
        self, features: int, trits: int, *, gradients: str = "float", backend: str | None = None
    ) -> None:
        if trits not in VECTOR_TRITS:
            raise ValueError(f"trits must be one of {VECTOR_TRITS}, got {trits}")
        options = VoteOptions(scale_rule="frozen", gradients=gradients, backend=backend)
        super().__init__(features, trits, group_size="row", fan_in=1, **options)
        unit = 1 - trits.bit_length()
        zeros = torch.zeros(features, trits, dtype=torch.int8)
        votes = (
            torch.linspace(-_FURTHEST, _FURTHEST, trits)
            .round()
            .to(torch.int8)
            .expand_as(zeros)
            .contiguous()
        )
        self.set_trits(
            zeros, torch.full_like(self.exponent, unit), votes if self.accumulates else None
        )

    def forward(self) -> Tensor:
        """``v [N]``, float32; backward casts the votes."""
        rows = torch.arange(self.shape.out_features, device=self.weight.device)
        return 1 + self.look_up(rows, torch.float32).sum(dim=1)

    @torch.no_grad()
    def values(self) -> Tensor:
        """``v`` as float32 ``[N]``."""
        return 1 + self.dense_weight().sum(dim=1)


class TritRMSNorm(RMSNorm):
    """An RMSNorm without a float parameter whose gains are a :class:`TritVector`, 1 at birth."""

    def __init__(self, features: int, *, eps: float, trits: int, gradients: str = "float") -> None:
        super().__init__(features, eps=eps, gain=False)
        self.gains = TritVector(features, trits, gradients=gradients)

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., features]``, normalised, in its dtype."""
        y = super().forward(x)
        gains: Tensor = self.gains()
        return y * gains.to(y.dtype)


class OwnEpsTritRMSNorm(OwnEps, TritRMSNorm):
    """:class:`TritRMSNorm` with an eps of its own."""
