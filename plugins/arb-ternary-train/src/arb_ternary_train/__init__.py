"""Runs: from a config file to a trained model, its checkpoints, metrics and report.

``DistributedConfig`` and ``DistributedStrategy`` are loaded when they are first used (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arb_ternary_train.distributed import DistributedConfig, DistributedStrategy

__version__ = "0.1.0"

__all__ = ["DistributedConfig", "DistributedStrategy", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("DistributedConfig", "DistributedStrategy"):
        from arb_ternary_train import distributed

        return getattr(distributed, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
