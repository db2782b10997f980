"""Vectors of numbers around 1 that are means of trits: gains of norms and factors of rows.

A gain has to move in small steps. One trit with a power of two cannot do that: its next values are
half, twice and 0. A mean of trits can, and it learns by votes like any other ternary weight, so
that a model with such vectors has no float parameter.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.ternary.module import TernaryModule, VoteOptions
from arb_ternary_text.models.config import VECTOR_TRITS

#: Initial accumulators are spread from minus this to this: one less than the smallest threshold at
#: which a rule flips a trit.
_SPREAD: Final = 31


class TritVector(TernaryModule):
    """``v[n] = 1 + sum_d T[n, d] / D``: numbers from 0 to 2 in steps of ``1 / D``, exact in
    bfloat16.

    It is 1 plus the row sums of a ternary matrix ``[N, D]`` with exponents ``-log2(D)``. All trits
    of a number have the same gradient and would flip at once, so their initial accumulators are
    spread. The accumulators have 8 bits, whatever those of the model's matrices have.

    Args:
        features: ``N``.
        trits: ``D``, one of :data:`VECTOR_TRITS`; all trits are 0 at initialisation.
        gradients: as for every ternary module.
        backend: as for every ternary module.
    """

    #: Without it, a number whose trits all move at once would move eight times as fast as AdamW
    #: moves a gain at its usual rates.
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
        votes = None
        if self.accumulates:
            spread = torch.linspace(-_SPREAD, _SPREAD, trits).round().to(torch.int8)
            votes = spread.expand_as(zeros).contiguous()
        self.set_trits(zeros, torch.full_like(self.exponent, unit), votes)

    def forward(self) -> Tensor:
        """Return ``v [N]``, float32; backward casts the votes."""
        rows = torch.arange(self.shape.out_features, device=self.weight.device)
        return 1 + self.look_up(rows, torch.float32).sum(dim=1)

    @torch.no_grad()
    def values(self) -> Tensor:
        """Return ``v`` as float32 ``[N]``, without a gradient."""
        return 1 + self.dense_weight().sum(dim=1)
