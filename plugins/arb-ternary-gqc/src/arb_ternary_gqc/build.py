"""Factories of the optimizers ``gqc.*``."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from arb_ternary.optim.protocol import Trainable, build_optimizer
from arb_ternary_gqc.config import (
    GNRConfig,
    GNSConfig,
    GNTSConfig,
    MHTConfig,
    SBCConfig,
    WrapperConfig,
)
from arb_ternary_gqc.gnr import GradientNormRescaler
from arb_ternary_gqc.gns import GradientNoiseScale
from arb_ternary_gqc.gnts import GradientNormThreshold
from arb_ternary_gqc.mht import MetricHypothesisTest
from arb_ternary_gqc.sbc import ScheduledBatch


def _inner(config: WrapperConfig, trainable: Trainable) -> Optimizer:
    """Build the wrapped optimizer.

    Raises:
        ConfigError: the model has parts that it cannot train.
    """
    return build_optimizer("optimizer.inner", config.inner, trainable)


def _options(config: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(config, name) for name in (*names, "non_finite")}


def build_gnts(config: GNTSConfig, trainable: Trainable) -> GradientNormThreshold:
    """Build ``gqc.gnts``."""
    options = _options(config, "threshold", "max_batch_draws", "per_group", "schedule")
    return GradientNormThreshold(_inner(config, trainable), **options)


def build_gnr(config: GNRConfig, trainable: Trainable) -> GradientNormRescaler:
    """Build ``gqc.gnr``."""
    options = _options(config, "target_norm", "mode", "per_group", "schedule")
    return GradientNormRescaler(_inner(config, trainable), **options)


def build_sbc(config: SBCConfig, trainable: Trainable) -> ScheduledBatch:
    """Build ``gqc.sbc``."""
    options = _options(
        config, "physical_batch_size", "initial_logical_batch_size", "max_batch_draws", "schedule"
    )
    return ScheduledBatch(_inner(config, trainable), **options)


def build_mht(config: MHTConfig, trainable: Trainable) -> MetricHypothesisTest:
    """Build ``gqc.mht``."""
    options = _options(config, "confidence", "error_tolerance", "ema_alpha", "max_batch_draws")
    return MetricHypothesisTest(_inner(config, trainable), **options)


def build_gns(config: GNSConfig, trainable: Trainable) -> GradientNoiseScale:
    """Build ``gqc.gns``."""
    options = _options(config, "noise_multiplier", "max_batch_draws", "estimator")
    return GradientNoiseScale(_inner(config, trainable), **options)
