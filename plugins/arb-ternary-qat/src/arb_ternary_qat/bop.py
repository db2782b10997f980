"""Bop: trits that flip when a momentum of the gradient passes a threshold.

Source: Helwegen et al., "Latent Weights Do Not Exist: Rethinking Binarized Neural Network
Optimization", 2019 (arXiv:1906.02107). With ``g`` the gradient with respect to the dense weight,
each step computes::

    m = (1 - gamma) m + gamma g;    where |m| >= tau:  T = clip(T - sign(m), -1, 1)

For a binary weight that is the published rule (a flip if ``m`` has the weight's sign); a trit needs
two crossings from -1 to 1. ``normalise`` is the second-order variant, Suarez-Ramirez et al.,
"A Bop and Beyond: A Second Order Optimizer for Binarized Neural Networks", 2021
(arXiv:2104.05124)::

    v = (1 - sigma) v + sigma g^2;    m / (sqrt(v) + eps) takes the place of m in the comparison

A flip does not reset the momentum. Both averages start at 0 without bias correction. The group's
``lr``, initially 1, multiplies ``gamma``, so that a schedule makes the average longer; at 0 nothing
moves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Trainable
from arb_ternary_qat.config import BopConfig
from arb_ternary_qat.direct import DirectLinear
from arb_ternary_qat.direct_optimizer import DirectOptimizer, direct_modules


class Bop(DirectOptimizer):
    """Flips ternary codes against the sign of the momentum."""

    def _update(self, group: dict[str, Any], module: DirectLinear, gradient_NK: Tensor) -> Tensor:
        if group["lr"] == 0:
            return module.codes()
        state = self.state[module.weight]
        if not state:
            state["momentum"] = torch.zeros_like(gradient_NK)
            if group["normalise"]:
                state["square"] = torch.zeros_like(gradient_NK)
        momentum: Tensor = state["momentum"]
        momentum.lerp_(gradient_NK, min(1.0, group["gamma"] * group["lr"]))
        signal = momentum
        if group["normalise"]:
            square = state["square"]
            square.mul_(1 - group["sigma"]).addcmul_(gradient_NK, gradient_NK, value=group["sigma"])
            signal = momentum / square.sqrt().add_(group["eps"])
        moves_NK = momentum.sign().mul_(signal.abs() >= group["tau"]).to(torch.int8)
        return (module.codes() - moves_NK).clamp_(-1, 1)


def build(config: BopConfig, trainable: Trainable) -> Bop:
    """Build the optimizer ``bop`` of the linears of model ``direct`` with ternary levels.

    Raises:
        ConfigError: there are none, there are other parts, or the levels are not ternary.
    """
    modules = direct_modules("bop", trainable)
    for name, module in modules.items():
        if module.levels != "ternary":
            raise ConfigError(
                f"optimizer: bop flips ternary weights, but {name!r} has levels {module.levels!r}",
                "Use `model: {name: direct, levels: ternary}`, or the optimizer dqt.",
            )
    return Bop(
        modules,
        {
            "lr": 1.0,
            "gamma": config.gamma,
            "tau": config.tau,
            "normalise": config.normalise,
            "sigma": config.sigma,
            "eps": config.eps,
        },
    )
