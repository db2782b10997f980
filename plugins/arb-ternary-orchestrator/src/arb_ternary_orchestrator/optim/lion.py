"""Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from lion_pytorch.lion_pytorch import update_fn
from torch import Tensor

from arb_ternary_orchestrator.optim.base import FloatOptimizer, wide


class Lion(FloatOptimizer):
    """Steps by the sign of an interpolated momentum, by the update of ``lion-pytorch``.

    ``c = beta1 m + (1 - beta1) g``; ``p -= lr (sign(c) + weight_decay p)``; then ``m = beta2 m + (1
    - beta2) g``. The package's own optimizer is not used because its momentum has the number format
    of the parameter, in which a decay near 1 stands still for bfloat16, and because a copy of it
    cannot step.

    Args:
        params: parameters, ``(name, parameter)`` pairs or param groups; real floating-point
            tensors.
        lr: step of every element.
        betas: ``(beta1, beta2)``.
        weight_decay: decoupled decay, as a multiple of ``lr``.
    """

    buffers: ClassVar[int] = 1

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter, dtype=wide(parameter))
            update_fn(
                parameter,
                parameter.grad,
                state["momentum"],
                group["lr"],
                group["weight_decay"],
                *group["betas"],
            )
