"""Factories of the optimizers of float parameters."""

from __future__ import annotations

from arb_ternary.optim.protocol import Trainable
from arb_ternary_orchestrator.optim.base import float_groups
from arb_ternary_orchestrator.optim.config import LionConfig
from arb_ternary_orchestrator.optim.lion import Lion

__all__ = ["build_lion"]


def build_lion(config: LionConfig, trainable: Trainable) -> Lion:
    """Factory of ``lion``: all float parameters of ``trainable``; only matrices decay.

    Raises:
        ConfigError: there are no float parameters.
    """
    return Lion(float_groups("lion", trainable, config.weight_decay), config.lr, (config.beta1, config.beta2))
