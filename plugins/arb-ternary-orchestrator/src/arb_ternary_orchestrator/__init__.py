"""Orchestrated training. The public names are loaded when they are first used (PEP 562)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arb_ternary_orchestrator.optim.adagc import AdaGC
    from arb_ternary_orchestrator.optim.config import (
        AdaGCConfig,
        GradientNoiseConfig,
        GradientSmootherConfig,
        LionConfig,
        NowcastingConfig,
        SGDConfig,
        SWATSConfig,
    )
    from arb_ternary_orchestrator.optim.gradient_noise import GradientNoise
    from arb_ternary_orchestrator.optim.gradient_smoother import GradientSmoother
    from arb_ternary_orchestrator.optim.lion import Lion
    from arb_ternary_orchestrator.optim.nowcasting import Nowcasting
    from arb_ternary_orchestrator.optim.swats import SWATS

__version__ = "0.1.0"

_LAZY = {
    "AdaGC": "arb_ternary_orchestrator.optim.adagc",
    "AdaGCConfig": "arb_ternary_orchestrator.optim.config",
    "GradientNoise": "arb_ternary_orchestrator.optim.gradient_noise",
    "GradientNoiseConfig": "arb_ternary_orchestrator.optim.config",
    "GradientSmoother": "arb_ternary_orchestrator.optim.gradient_smoother",
    "GradientSmootherConfig": "arb_ternary_orchestrator.optim.config",
    "Lion": "arb_ternary_orchestrator.optim.lion",
    "LionConfig": "arb_ternary_orchestrator.optim.config",
    "Nowcasting": "arb_ternary_orchestrator.optim.nowcasting",
    "NowcastingConfig": "arb_ternary_orchestrator.optim.config",
    "SGDConfig": "arb_ternary_orchestrator.optim.config",
    "SWATS": "arb_ternary_orchestrator.optim.swats",
    "SWATSConfig": "arb_ternary_orchestrator.optim.config",
}

__all__ = [
    "SWATS",
    "AdaGC",
    "AdaGCConfig",
    "GradientNoise",
    "GradientNoiseConfig",
    "GradientSmoother",
    "GradientSmootherConfig",
    "Lion",
    "LionConfig",
    "Nowcasting",
    "NowcastingConfig",
    "SGDConfig",
    "SWATSConfig",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
