"""Orchestrated training. The public names are loaded when they are first used (PEP 562)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arb_ternary_orchestrator.optim.config import LionConfig
    from arb_ternary_orchestrator.optim.lion import Lion

__version__ = "0.1.0"

_LAZY = {
    "Lion": "arb_ternary_orchestrator.optim.lion",
    "LionConfig": "arb_ternary_orchestrator.optim.config",
}

__all__ = ["Lion", "LionConfig", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
