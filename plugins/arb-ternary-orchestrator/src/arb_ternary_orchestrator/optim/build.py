"""Factories of the optimizers of float parameters.

Each trains all float parameters that it is given. With weight decay matrices decay, and vectors do
not.
"""

from __future__ import annotations

from typing import Any

from attrs import asdict
from torch.optim import SGD, Optimizer

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Trainable, build_optimizer
from arb_ternary_orchestrator.optim.adagc import AdaGC
from arb_ternary_orchestrator.optim.config import (
    NOT_TRITS,
    AdaGCConfig,
    GradientNoiseConfig,
    GradientSmootherConfig,
    LionConfig,
    NowcastingConfig,
    SGDConfig,
    SWATSConfig,
    WrapperConfig,
)
from arb_ternary_orchestrator.optim.gradient_noise import GradientNoise
from arb_ternary_orchestrator.optim.gradient_smoother import GradientSmoother
from arb_ternary_orchestrator.optim.lion import Lion
from arb_ternary_orchestrator.optim.nowcasting import Nowcasting
from arb_ternary_orchestrator.optim.swats import SWATS
from arb_ternary_train.optim.adamw import float_groups


def build_lion(config: LionConfig, trainable: Trainable) -> Lion:
    """Factory of ``lion``; ConfigError without float parameters."""
    groups = float_groups("lion", trainable, config.weight_decay)
    return Lion(groups, lr=config.lr, betas=(config.beta1, config.beta2))


def build_sgd(config: SGDConfig, trainable: Trainable) -> SGD:
    """Factory of ``sgd``; ConfigError without float parameters."""
    groups = float_groups("sgd", trainable, config.weight_decay)
    return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)


def build_swats(config: SWATSConfig, trainable: Trainable) -> SWATS:
    """Factory of ``swats``; ConfigError without float parameters."""
    return SWATS(float_groups("swats", trainable, config.weight_decay), config)


def _inner(config: WrapperConfig, trainable: Trainable) -> Optimizer:
    return build_optimizer("optimizer.inner", config.inner, trainable)


def _options(config: WrapperConfig) -> dict[str, Any]:
    return asdict(config, recurse=False, filter=lambda field, _: field.name != "inner")


def build_adagc(config: AdaGCConfig, trainable: Trainable) -> AdaGC:
    """Factory of ``adagc``; errors as those of the wrapped optimizer."""
    return AdaGC(_inner(config, trainable), **_options(config))


def build_gradient_smoother(
    config: GradientSmootherConfig, trainable: Trainable
) -> GradientSmoother:
    """Factory of ``gradient_smoother``; errors as those of the wrapped optimizer."""
    return GradientSmoother(_inner(config, trainable), **_options(config))


def build_gradient_noise(config: GradientNoiseConfig, trainable: Trainable) -> GradientNoise:
    """Factory of ``gradient_noise``; errors as those of the wrapped optimizer."""
    return GradientNoise(_inner(config, trainable), **_options(config))


def build_nowcasting(config: NowcastingConfig, trainable: Trainable) -> Nowcasting:
    """Factory of ``nowcasting``.

    Raises:
        ConfigError: it would have to train integer weights.
    """
    for name in (*trainable.ternary, *trainable.stored):
        raise ConfigError(
            f"optimizer: nowcasting cannot train {name!r}: {NOT_TRITS}",
            "Use `optimizer: {name: split, ternary: ..., float: {name: nowcasting}}`.",
        )
    return Nowcasting(_inner(config, trainable), **_options(config))
