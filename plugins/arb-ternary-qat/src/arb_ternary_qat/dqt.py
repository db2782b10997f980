"""Direct quantised training: AdamW on weights that are stored as integers only.

Source: Zhao et al., "Direct Quantized Training of Language Models with Stochastic Rounding", 2024
(arXiv:2412.04787). With ``C`` the codes of a matrix, ``s`` its scale and float32 moments ``m`` and
``v`` of AdamW (bias-corrected, with decoupled weight decay), each step computes::

    w = s C;    w' = w - lr * (m / (sqrt(v) + eps) + weight_decay * w)
    C = clip(floor(w' / s + uniform[0, 1)))

Rounding is unbiased, so that updates far below one code still move the weights, as a random walk:
its variance per step is ``f (1 - f)`` codes squared for a fraction ``f``. The noise is the counter
hash of the run's seed, the module's step, its name and the element: it needs no storage and is the
same after a resume.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from arb_ternary.counters.hashing import hash_words, uniform
from arb_ternary.optim.protocol import Trainable
from arb_ternary_qat.config import DQTConfig
from arb_ternary_qat.direct import DirectLinear
from arb_ternary_qat.direct_optimizer import DirectOptimizer, direct_modules


def stochastic_round(x: Tensor, seed: int, step: int, stream: int) -> Tensor:
    """Return ``floor(x + u)``, ``u`` uniform in [0, 1) from the counter hash of the element.

    Integers do not change.
    """
    return uniform(tuple(x.shape), seed, step, stream, device=x.device).add_(x).floor_()


class DQT(DirectOptimizer):
    """AdamW with stochastic rounding; the group's ``lr`` is AdamW's, which a schedule may drive."""

    def _update(self, group: dict[str, Any], module: DirectLinear, gradient_NK: Tensor) -> Tensor:
        state = self.state[module.weight]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(gradient_NK)
            state["exp_avg_sq"] = torch.zeros_like(gradient_NK)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"]
        square = state["exp_avg_sq"]
        mean.lerp_(gradient_NK, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient_NK, gradient_NK, value=1 - beta2)
        root = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        # In units of the scale: with an update of zero the codes do not change.
        target = module.codes().float().mul_(1 - group["lr"] * group["weight_decay"])
        rate = group["lr"] / (1 - beta1 ** state["step"])
        target.sub_(mean.div(root).mul_(rate).div_(module.scale))
        target.clamp_(-module.limit, module.limit)
        return stochastic_round(target, *hash_words(module.control)).to(torch.int8)


def build(config: DQTConfig, trainable: Trainable) -> DQT:
    """Build the optimizer ``dqt`` of the linears of model ``direct``.

    Raises:
        ConfigError: there are none, or there are other parts.
    """
    return DQT(
        direct_modules("dqt", trainable),
        {
            "lr": config.lr,
            "betas": (config.beta1, config.beta2),
            "eps": config.eps,
            "weight_decay": config.weight_decay,
        },
    )
