"""Training by several processes that together do what one process does, to the byte.

The public names are loaded when they are first used (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arb_ternary_distributed.config import (
        DistributedConfig,
        DistributedStrategy,
        get_rank,
        get_world_size,
        is_distributed,
        is_main_process,
    )

__version__ = "0.1.0"

__all__ = [
    "DistributedConfig",
    "DistributedStrategy",
    "__version__",
    "get_rank",
    "get_world_size",
    "is_distributed",
    "is_main_process",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("arb_ternary_distributed.config"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
