"""AdamW with the weight decay of the BitNet recipe, which ends after the first stage of training.

Source: Microsoft, "The Era of 1-bit LLMs: Training Tips, Code and FAQ", 2024. The magnitude of the
latent weight acts as the confidence of a trit; in the second stage decay would only make trits flip
again. The other half of the recipe is the phase's ``lr_schedule: two_stage``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Trainable
from arb_ternary_qat.config import BitnetAdamWConfig


class BitnetAdamW(torch.optim.AdamW):
    """torch's AdamW, whose groups decay by ``first_decay`` in their first ``decay_steps`` steps.

    The number of ``updates`` is an entry of each group and saved with it.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of AdamW with the weight decay of its stage."""
        for group in self.param_groups:
            last = group["decay_steps"]
            decays = last is None or group["updates"] < last
            group["weight_decay"] = group["first_decay"] if decays else 0.0
            group["updates"] += 1
        return super().step(closure)


def build(config: BitnetAdamWConfig, trainable: Trainable) -> BitnetAdamW:
    """Build the optimizer ``bitnet_adamw`` of all float parameters; only matrices decay.

    Raises:
        ConfigError: there are no float parameters.
    """
    groups: list[dict[str, Any]] = []
    for is_matrix, decay in ((True, config.weight_decay), (False, 0.0)):
        params = [p for p in trainable.floats.values() if (p.dim() >= 2) == is_matrix]
        if params:
            groups.append(
                {
                    "params": params,
                    "weight_decay": decay,
                    "first_decay": decay,
                    "decay_steps": config.decay_steps,
                    "updates": 0,
                    "kind": "float",
                }
            )
    if not groups:
        raise ConfigError(
            "optimizer: bitnet_adamw trains float parameters, and the model has none",
            "use sign_votes",
        )
    fused = all(p.device.type in ("cpu", "cuda") for p in trainable.floats.values())
    return BitnetAdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused
    )
