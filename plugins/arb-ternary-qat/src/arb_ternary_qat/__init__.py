"""BitNet b1.58, the published baseline of training ternary weights.

The public names are loaded when they are first used (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arb_ternary_qat.bitnet import BitLinear
    from arb_ternary_qat.bitnet_adamw import BitnetAdamW

__version__ = "0.1.0"

_LAZY = {
    "BitLinear": "arb_ternary_qat.bitnet",
    "BitnetAdamW": "arb_ternary_qat.bitnet_adamw",
}

__all__ = ["BitLinear", "BitnetAdamW", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
