"""RMSNorm with a ternary gain."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from arb_ternary.ternary.module import GroupSize, TernaryModule, VoteOptions


class TernaryRMSNorm(TernaryModule):
    """``y = x * rsqrt(mean(x**2) + eps) * gain`` with a gain ``T * 2**E`` that is 1 at birth and learns by votes.

    The gain is a ternary weight of one row, so its state, votes and flips are those of every ternary module. With
    ``learned=False`` the gain stays 1 and is not read at all.

    Args:
        features: ``K``.
        eps: added to the mean square.
        learned: whether the gain exists for the result and casts votes.
        group_size: features that share an exponent.
        device: of the buffers.
        options: see :class:`~arb_ternary.ternary.module.VoteOptions`.
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-6,
        learned: bool = True,
        group_size: GroupSize = 32,
        device: torch.device | str | None = None,
        **options: Unpack[VoteOptions],
    ) -> None:
        super().__init__(1, features, group_size=group_size, fan_in=1, **options)
        self.features = features
        self.eps = eps
        self.learned = learned
        self.frozen = not learned
        self.set_trits(torch.ones(1, features, dtype=torch.int8), torch.zeros_like(self.exponent))
        self.register_buffer("_row", torch.zeros(1, dtype=torch.int64), persistent=False)
        self._row: Tensor
        if device is not None:
            self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x [..., K]`` (float); the result has its shape and dtype."""
        y = torch.nn.functional.rms_norm(x.to(torch.float32), (self.features,), eps=self.eps)
        if self.learned:
            y = y * self.look_up(self._row, torch.float32).view(self.features)
        return y.to(x.dtype)
