"""SWATS: Keskar and Socher, "Improving Generalization Performance by Switching from Adam to SGD",
2017.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from arb_ternary.optim.ternary import to_host
from arb_ternary_orchestrator.optim.base import FloatOptimizer, wide
from arb_ternary_orchestrator.optim.config import SWATSConfig

#: State of a new group. It is not part of ``defaults``, which are settings.
_START: Final = {"phase": "adam", "steps": 0, "projection": 0.0, "projections": 0, "sgd_rate": None}


class SWATS(FloatOptimizer):
    """Adam, until the rate that SGD would need has settled; then SGD with momentum at that rate.

    With Adam's step ``p`` and the gradient ``g`` of a group, both over all its parameters, ``gamma
    = p.p / -(p.g)`` is the rate at which SGD's step, projected on Adam's, would be as long. Its
    average with decay ``beta2``, corrected for its beginning at zero, is the estimate ``Lambda``. A
    group switches when the two are closer than the threshold; then

        ``v = beta1 v + g``, ``w -= (1 - beta1) Lambda v``.

    Steps in which ``p.g`` is zero are ignored. A group whose estimate is negative does not switch,
    because its steps have pointed uphill. Rates are kept as multiples of the group's ``lr``, so
    that a schedule acts on Adam, the average and SGD alike; at a constant ``lr`` this is the
    paper's algorithm. Every group decides for itself.

    Groups have the entries ``lr`` (Adam's), ``betas``, ``eps``, ``weight_decay`` (decoupled, a
    multiple of ``lr`` in both phases), ``switch_threshold`` and ``min_steps_before_switch``. State
    among them: ``phase`` ("adam" or "sgd"), ``steps``, ``projection`` and ``projections`` (the
    average, uncorrected, and how many values went into it), ``sgd_rate`` (``Lambda`` as a multiple
    of ``lr``; None before the switch).

    Args:
        params: parameters, ``(name, parameter)`` pairs or param groups; real floating-point
            tensors.
        config: options; by default those of ``SWATSConfig()``.
    """

    buffers: ClassVar[int] = 2

    def __init__(self, params: Iterable[Any], config: SWATSConfig | None = None) -> None:
        config = config or SWATSConfig()
        super().__init__(
            params,
            {
                "lr": config.adam_lr,
                "betas": (config.beta1, config.beta2),
                "eps": config.eps,
                "weight_decay": config.weight_decay,
                "switch_threshold": config.switch_threshold,
                "min_steps_before_switch": config.min_steps_before_switch,
            },
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which begins with Adam; ConfigError for parameters without float values."""
        super().add_param_group({**_START, **param_group})

    def _statistics(self) -> dict[str, float]:
        return {"sgd_groups": float(sum(group["phase"] == "sgd" for group in self.param_groups))}

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        group["steps"] += 1
        if group["phase"] == "sgd":
            self._step_sgd(group, parameters)
            return
        products = [self._step_adam(group, parameter) for parameter in parameters]
        numbers = to_host([product.to(torch.float32) for pair in products for product in pair])
        squares = math.fsum(numbers[::2])
        along = math.fsum(numbers[1::2])
        if along == 0 or group["lr"] == 0:
            return
        found = squares / -along / group["lr"]
        beta2 = group["betas"][1]
        group["projection"] = beta2 * group["projection"] + (1 - beta2) * found
        group["projections"] += 1
        estimate = group["projection"] / (1 - beta2 ** group["projections"])
        settled = abs(estimate - found) * group["lr"] < group["switch_threshold"]
        if settled and estimate > 0 and group["steps"] > max(1, group["min_steps_before_switch"]):
            group.update(phase="sgd", sgd_rate=estimate)
            for parameter in group["params"]:
                self.state.pop(parameter, None)

    def _step_adam(self, group: dict[str, Any], parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Update ``parameter``; return the products of the step (without decay) with itself and
        with the gradient.
        """
        assert parameter.grad is not None
        gradient = parameter.grad.to(wide(parameter))
        state = self.state[parameter]
        if not state:
            state.update(step=0, mean=torch.zeros_like(gradient), square=torch.zeros_like(gradient))
        state["step"] += 1
        (beta1, beta2) = group["betas"]
        lr = group["lr"]
        step = state["step"]
        state["mean"].lerp_(gradient, 1 - beta1)
        state["square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        move = (state["mean"] / (state["square"].sqrt() + group["eps"])).mul_(-rate)
        weight = parameter.to(move.dtype) * (1 - lr * group["weight_decay"])
        parameter.copy_(weight.add_(move))
        return (move * move).sum(), (move * gradient).sum()

    def _step_sgd(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        lr = group["lr"]
        beta1 = group["betas"][0]
        for parameter in parameters:
            assert parameter.grad is not None
            gradient = parameter.grad.to(wide(parameter))
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(gradient)
            momentum = state["momentum"].mul_(beta1).add_(gradient)
            weight = parameter.to(momentum.dtype) * (1 - lr * group["weight_decay"])
            parameter.copy_(weight.add_(momentum, alpha=-(1 - beta1) * group["sgd_rate"] * lr))
