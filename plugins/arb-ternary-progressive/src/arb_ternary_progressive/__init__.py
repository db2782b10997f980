"""Progressive training: deep models built stack by stack.

The public names are loaded when they are first used (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arb_ternary_progressive.adapters import AdapterSpec as AdapterSpec
    from arb_ternary_progressive.builder import ProgressiveRackBuilder as ProgressiveRackBuilder
    from arb_ternary_progressive.dataloader import ProgressiveDataLoader as ProgressiveDataLoader
    from arb_ternary_progressive.masking import MlmMasking as MlmMasking
    from arb_ternary_progressive.masking import ProgressiveMasking as ProgressiveMasking
    from arb_ternary_progressive.masking import TimeStepMasking as TimeStepMasking
    from arb_ternary_progressive.rack import DecoderRack as DecoderRack
    from arb_ternary_progressive.rack import Rack as Rack
    from arb_ternary_progressive.stack import Stack as Stack
    from arb_ternary_progressive.stack import create_stack_from_config as create_stack_from_config
    from arb_ternary_progressive.stackwise import ModelConfig as ModelConfig
    from arb_ternary_progressive.stackwise import ProgressiveConfig as ProgressiveConfig
    from arb_ternary_progressive.stackwise import StackWiseConfig as StackWiseConfig
    from arb_ternary_progressive.stackwise import TrainingConfig as TrainingConfig
    from arb_ternary_progressive.time_embedding import TimeEmbedding as TimeEmbedding
    from arb_ternary_progressive.trainer import ProgressiveTrainer as ProgressiveTrainer

__version__ = "0.1.0"

#: Modules of the public names.
_LAZY = {
    "AdapterSpec": "adapters",
    "DecoderRack": "rack",
    "MlmMasking": "masking",
    "ModelConfig": "stackwise",
    "ProgressiveConfig": "stackwise",
    "ProgressiveDataLoader": "dataloader",
    "ProgressiveMasking": "masking",
    "ProgressiveRackBuilder": "builder",
    "ProgressiveTrainer": "trainer",
    "Rack": "rack",
    "Stack": "stack",
    "StackWiseConfig": "stackwise",
    "TimeEmbedding": "time_embedding",
    "TimeStepMasking": "masking",
    "TrainingConfig": "stackwise",
    "create_stack_from_config": "stack",
}

__all__ = [
    "AdapterSpec",
    "DecoderRack",
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
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
