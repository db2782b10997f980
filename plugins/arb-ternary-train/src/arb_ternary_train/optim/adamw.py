"""AdamW for float parameters: torch's own, or one with float32 state for float16 parameters."""

from __future__ import annotations

from typing import Any

import torch

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Trainable
from arb_ternary_train.optim.config import AdamWConfig
from arb_ternary_train.optim.wide_adamw import WideAdamW


def float_groups(name: str, trainable: Trainable, weight_decay: float) -> list[dict[str, Any]]:
    """Return param groups of all float parameters: matrices, which decay, and vectors.

    Args:
        name: name of the optimizer, for the error.
        trainable: what the optimizer is given.
        weight_decay: decay of matrices.

    Raises:
        ConfigError: there are no float parameters.
    """
    matrices = [p for p in trainable.floats.values() if p.dim() >= 2]
    vectors = [p for p in trainable.floats.values() if p.dim() < 2]
    groups = []
    for params, decay in ((matrices, weight_decay), (vectors, 0.0)):
        if params:
            groups.append({"params": params, "weight_decay": decay, "kind": "float"})
    if not groups:
        raise ConfigError(
            f"optimizer: {name} trains float parameters, and the model has none", "use scaled_votes"
        )
    return groups


def build(config: AdamWConfig, trainable: Trainable) -> torch.optim.AdamW:
    """Build the optimizer ``adamw`` over all float parameters; only matrices decay.

    Raises:
        ConfigError: there are no float parameters.
    """
    groups = float_groups("adamw", trainable, config.weight_decay)
    fused = all(p.device.type in ("cpu", "cuda") for p in trainable.floats.values())
    narrow = any(p.dtype == torch.float16 for p in trainable.floats.values())
    kind = WideAdamW if narrow else torch.optim.AdamW
    return kind(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused
    )
