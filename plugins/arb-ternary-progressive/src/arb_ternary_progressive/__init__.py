"""Progressive training: deep models built stack by stack.

The public names are loaded when they are first used (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arb_ternary_progressive.activation_cache import ActivationCache
    from arb_ternary_progressive.adapters import AdapterSpec
    from arb_ternary_progressive.builder import ProgressiveRackBuilder
    from arb_ternary_progressive.config import ModelConfig, ProgressiveConfig, StackWiseConfig, TrainingConfig
    from arb_ternary_progressive.dataloader import ProgressiveDataLoader
    from arb_ternary_progressive.masking_mlm import MlmMasking
    from arb_ternary_progressive.masking_progressive import ProgressiveMasking
    from arb_ternary_progressive.masking_time_step import TimeStepMasking
    from arb_ternary_progressive.rack import Rack
    from arb_ternary_progressive.stack import Stack, create_stack_from_config
    from arb_ternary_progressive.time_embedding import TimeEmbedding
    from arb_ternary_progressive.trainer import ProgressiveTrainer

__version__ = "0.1.0"

_LAZY = {
    "ActivationCache": "activation_cache:ActivationCache",
    "AdapterSpec": "adapters:AdapterSpec",
    "MlmMasking": "masking_mlm:MlmMasking",
    "ModelConfig": "config:ModelConfig",
    "ProgressiveConfig": "config:ProgressiveConfig",
    "ProgressiveDataLoader": "dataloader:ProgressiveDataLoader",
    "ProgressiveMasking": "masking_progressive:ProgressiveMasking",
    "ProgressiveRackBuilder": "builder:ProgressiveRackBuilder",
    "ProgressiveTrainer": "trainer:ProgressiveTrainer",
    "Rack": "rack:Rack",
    "Stack": "stack:Stack",
    "StackWiseConfig": "config:StackWiseConfig",
    "TimeEmbedding": "time_embedding:TimeEmbedding",
    "TimeStepMasking": "masking_time_step:TimeStepMasking",
    "TrainingConfig": "config:TrainingConfig",
    "create_stack_from_config": "stack:create_stack_from_config",
}

__all__ = [
    "ActivationCache",
    "AdapterSpec",
    "MlmMasking",
    "ModelConfig",
    "ProgressiveConfig",
    "ProgressiveDataLoader",
    "ProgressiveMasking",
    "ProgressiveRackBuilder",
    "ProgressiveTrainer",
    "Rack",
    "Stack",
    "StackWiseConfig",
    "TimeEmbedding",
    "TimeStepMasking",
    "TrainingConfig",
    "__version__",
    "create_stack_from_config",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, _, attribute = _LAZY[name].partition(":")
        return getattr(import_module(f"{__name__}.{module}"), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
