"""Smoothing of gradients by an exponential average."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from arb_ternary_orchestrator.optim.base import wide
from arb_ternary_orchestrator.optim.wrapper import FloatWrapper


class GradientSmoother(FloatWrapper):
    """Replaces each gradient by the exponential average of the parameter's gradients.

    ``s = decay s + (1 - decay) g``, divided by ``1 - decay**k`` after ``k`` gradients (Kingma and
    Ba, 2015, section 3), so that a constant gradient is unchanged from the first step on. An update
    with a gradient that is not finite is dropped whole: it would stay in the average.

    Args:
        inner: the optimizer that steps.
        decay: decay of the average.
    """

    refuses: ClassVar[bool] = True

    def __init__(self, inner: Optimizer, *, decay: float = 0.9) -> None:
        super().__init__(inner)
        self.decay = decay

    def _before(self, parameters: list[Tensor], norms: list[float]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            gradient = parameter.grad.to(wide(parameter))
            state = self.state[parameter]
            if not state:
                state.update(seen=0, average=torch.zeros_like(gradient))
            state["seen"] += 1
            state["average"].lerp_(gradient, 1 - self.decay)
            parameter.grad.copy_(state["average"] / (1 - self.decay ** state["seen"]))

    def planned_state_bytes(self) -> int:
        """Return the bytes of one average per parameter."""
        return sum(each.numel() * wide(each).itemsize for each in self.parameters)
