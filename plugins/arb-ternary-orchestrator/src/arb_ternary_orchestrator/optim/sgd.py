"""torch's SGD, which says what it will keep."""

from __future__ import annotations

import torch
from torch import Tensor


class SGD(torch.optim.SGD):
    """``torch.optim.SGD``."""

    def planned_state_bytes(self) -> int:
        """A momentum of each parameter whose group has one; see
        ``arb_ternary_train.protocols.PlansState``.
        """
        kept: list[Tensor] = [
            p for group in self.param_groups if group["momentum"] for p in group["params"]
        ]
        return sum(parameter.nbytes for parameter in kept)
