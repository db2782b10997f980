"""Direct quantised training: AdamW on weights that are only ever stored as whole numbers.

Source: Zhao et al., "Direct Quantized Training of Language Models with Stochastic Rounding", 2024
(arXiv:2412.04787). Each step, with ``C`` the codes of a matrix, ``s`` its scale and ``u`` AdamW's
update (bias-corrected, decoupled weight decay; the moments are float32 and belong to the
optimizer)::

    w = s C;    w' = w - lr * (m / (sqrt(v) + eps) + weight_decay * w)
    C = clip(floor(w' / s + uniform[0, 1)))

Rounding is right in the mean, so that updates far below one code still move the weights, as a
random walk: its variance in a step is ``f (1 - f)`` codes squared for a fraction ``f``. The noise
is core's counter hash of the run's seed, the module's step, its name and the element: nothing to
store, the same after a resume.
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
    """``floor(x + u)`` with uniform ``u`` in [0, 1) from the counter hash of the element's index;
    whole ``x`` stay.
    """
    return uniform(tuple(x.shape), seed, step, stream, device=x.device).add_(x).floor_()


class DQT(DirectOptimizer):
    """AdamW with stochastic rounding. ``lr`` of the group is AdamW's, and a schedule may drive
    it.
    """

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
        # In units of the scale: with an update of zero the codes stay what they are, to the bit.
        target = module.codes().float().mul_(1 - group["lr"] * group["weight_decay"])
        target.sub_(
            mean.div(root).mul_(group["lr"] / (1 - beta1 ** state["step"])).div_(module.scale)
        )
        rounded = stochastic_round(
            target.clamp_(-module.limit, module.limit), *hash_words(module.control)
        )
        return rounded.to(torch.int8)


def build(config: DQTConfig, trainable: Trainable) -> DQT:
    """Factory of the optimizer ``dqt``: the linears of model ``direct``.

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
