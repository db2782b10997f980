"""SignGSD: a sign optimizer without state. Public names are loaded on first use (PEP 562)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arb_ternary_signgsd.sign_gsd import NanGradientError, ScaledOptum, SignGSD

__version__ = "0.1.0"

_LAZY = dict.fromkeys(
    ("NanGradientError", "ScaledOptum", "SignGSD"), "arb_ternary_signgsd.sign_gsd"
)

__all__ = ["NanGradientError", "ScaledOptum", "SignGSD", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
