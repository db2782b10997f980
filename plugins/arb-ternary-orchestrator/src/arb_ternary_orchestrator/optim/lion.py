"""Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from arb_ternary_orchestrator.optim.base import FloatOptimizer, wide


class Lion(FloatOptimizer):
    """Steps by the sign of an interpolated momentum.

    ``c = beta1 m + (1 - beta1) g``; ``p -= lr (sign(c) + weight_decay p)``; then ``m = beta2 m + (1
    - beta2) g``.

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
        lr = group["lr"]
        (beta1, beta2) = group["betas"]
        for parameter in parameters:
            assert parameter.grad is not None
            gradient = parameter.grad.to(wide(parameter))
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(gradient)
            momentum = state["momentum"]
            direction = momentum.lerp(gradient, 1 - beta1).sign_()
            weight = parameter.to(wide(parameter)) * (1 - lr * group["weight_decay"])
            parameter.copy_(weight.add_(direction, alpha=-lr))
            momentum.lerp_(gradient, 1 - beta2)
