"""Factories of the optimizers that wrap no other one.

Each trains all float parameters that it is given. With weight decay matrices decay, and vectors do
not.
"""

from __future__ import annotations

from torch.optim import SGD

from arb_ternary.optim.protocol import Trainable
from arb_ternary_orchestrator.optim.config import LionConfig, SGDConfig, SWATSConfig
from arb_ternary_orchestrator.optim.lion import Lion
from arb_ternary_orchestrator.optim.swats import SWATS
from arb_ternary_train.optim.adamw import float_groups


def build_lion(config: LionConfig, trainable: Trainable) -> Lion:
    """Build ``lion``; ConfigError without float parameters."""
    groups = float_groups("lion", trainable, config.weight_decay)
    return Lion(groups, lr=config.lr, betas=(config.beta1, config.beta2))


def build_sgd(config: SGDConfig, trainable: Trainable) -> SGD:
    """Build ``sgd``; ConfigError without float parameters."""
    groups = float_groups("sgd", trainable, config.weight_decay)
    return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)


def build_swats(config: SWATSConfig, trainable: Trainable) -> SWATS:
    """Build ``swats``; ConfigError without float parameters."""
    return SWATS(float_groups("swats", trainable, config.weight_decay), config)
