"""AdamW for float parameters: torch's own, or one that keeps float32 state where there are float16 parameters."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from attrs.validators import and_, ge, gt, lt

from arb_ternary.config.fields import without_effect
from arb_ternary.config.options import option
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Planned, Trainable
from arb_ternary_train.optim.wide_adamw import WideAdamW

__all__ = ["AdamWConfig", "build"]

_decay = and_(ge(0.0), lt(1.0))


@frozen(kw_only=True)
class AdamWConfig:
    """Options of AdamW (Loshchilov and Hutter, 2019)."""

    lr: float = option(1e-3, "Learning rate at the start; a schedule multiplies it.", validator=gt(0.0))
    beta1: float = option(0.9, "Decay of the first moment.", validator=_decay)
    beta2: float = option(0.95, "Decay of the second moment.", validator=_decay)
    eps: float = option(1e-8, "Added to the root of the second moment.", validator=gt(0.0))
    weight_decay: float = option(
        0.01, "Decoupled decay of matrices; vectors (gains, biases) do not decay.", validator=ge(0.0)
    )

    def contradictions_in(self, run: Any, planned: Planned | None) -> list[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        if planned is None or planned.matrices:
            return []
        return without_effect(self, "no float parameter of the model is a matrix", "weight_decay")


def build(config: AdamWConfig, trainable: Trainable) -> torch.optim.AdamW:
    """Factory of the optimizer ``adamw``: all float parameters of ``trainable``; only matrices decay.

    Raises:
        ConfigError: there are no float parameters.
    """
    matrices = [p for p in trainable.floats.values() if p.dim() >= 2]
    vectors = [p for p in trainable.floats.values() if p.dim() < 2]
    groups = [
        {"params": params, "weight_decay": decay, "kind": "float"}
        for params, decay in ((matrices, config.weight_decay), (vectors, 0.0))
        if params
    ]
    if not groups:
        raise ConfigError("optimizer: adamw trains float parameters, and the model has none", "use scaled_votes")
    fused = all(p.device.type in ("cpu", "cuda") for p in trainable.floats.values())
    narrow = any(p.dtype == torch.float16 for p in trainable.floats.values())
    kind = WideAdamW if narrow else torch.optim.AdamW
    return kind(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)
