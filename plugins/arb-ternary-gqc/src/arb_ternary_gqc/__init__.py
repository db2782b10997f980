"""Gradient quality control: optimizer wrappers that decide after every micro-batch whether to step.

The public names are loaded when they are first used (PEP 562). Each wrapper also has its name in
torch-gqc, so that a user of that package changes one import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arb_ternary_gqc.errors import NonFiniteGradientError
    from arb_ternary_gqc.gnr import GradientNormRescaler
    from arb_ternary_gqc.gns import GradientNoiseScale, OptimizerWrapperGNS
    from arb_ternary_gqc.gnts import GradientNormThreshold
    from arb_ternary_gqc.mht import MetricHypothesisTest
    from arb_ternary_gqc.sbc import ScheduledBatch
    from arb_ternary_gqc.schedule import QuantitySchedule
    from arb_ternary_gqc.warmup import NormWarmupScheduler
    from arb_ternary_gqc.wrapper import OptimizerWrapper

    OptimizerWrapperGNR = GradientNormRescaler
    OptimizerWrapperGNTS = GradientNormThreshold
    OptimizerWrapperMHT = MetricHypothesisTest
    OptimizerWrapperSBC = ScheduledBatch

__version__ = "0.1.0"

_LAZY = {
    "GradientNoiseScale": "gns:GradientNoiseScale",
    "GradientNormRescaler": "gnr:GradientNormRescaler",
    "GradientNormThreshold": "gnts:GradientNormThreshold",
    "MetricHypothesisTest": "mht:MetricHypothesisTest",
    "NonFiniteGradientError": "errors:NonFiniteGradientError",
    "NormWarmupScheduler": "warmup:NormWarmupScheduler",
    "OptimizerWrapper": "wrapper:OptimizerWrapper",
    "OptimizerWrapperGNR": "gnr:GradientNormRescaler",
    "OptimizerWrapperGNS": "gns:OptimizerWrapperGNS",
    "OptimizerWrapperGNTS": "gnts:GradientNormThreshold",
    "OptimizerWrapperMHT": "mht:MetricHypothesisTest",
    "OptimizerWrapperSBC": "sbc:ScheduledBatch",
    "QuantitySchedule": "schedule:QuantitySchedule",
    "ScheduledBatch": "sbc:ScheduledBatch",
}

__all__ = [
    "GradientNoiseScale",
    "GradientNormRescaler",
    "GradientNormThreshold",
    "MetricHypothesisTest",
    "NonFiniteGradientError",
    "NormWarmupScheduler",
    "OptimizerWrapper",
    "OptimizerWrapperGNR",
    "OptimizerWrapperGNS",
    "OptimizerWrapperGNTS",
    "OptimizerWrapperMHT",
    "OptimizerWrapperSBC",
    "QuantitySchedule",
    "ScheduledBatch",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, _, attribute = _LAZY[name].partition(":")
        return getattr(import_module(f"{__name__}.{module}"), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
