"""The factory of the optimizers ``gqc.*``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from attrs import fields

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
from arb_ternary_gqc.wrapper import OptimizerWrapper

#: The wrapper that each class of options is for. Options are arguments of its constructor.
_WRAPPERS: Final[Mapping[type, Callable[..., OptimizerWrapper]]] = {
    GNTSConfig: GradientNormThreshold,
    GNRConfig: GradientNormRescaler,
    SBCConfig: ScheduledBatch,
    MHTConfig: MetricHypothesisTest,
    GNSConfig: GradientNoiseScale,
}


def build(config: WrapperConfig, trainable: Trainable) -> OptimizerWrapper:
    """Build a wrapper, and the optimizer inside it.

    Raises:
        ConfigError: the model has parts that the inner optimizer cannot train.
    """
    kind: Any = type(config)
    options = {each.name: getattr(config, each.name) for each in fields(kind)}
    inner = build_optimizer("optimizer.inner", options.pop("inner"), trainable)
    return _WRAPPERS[kind](inner, **options)
