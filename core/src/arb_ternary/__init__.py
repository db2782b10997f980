"""ARB Ternary: train, convert and ship pure-ternary neural networks.

Importing this package imports neither torch nor anything else that is heavy. The public names below
are loaded when they are first used (PEP 562). So are the names that installed distributions add:
their entry points of the group ``arb_ternary.names``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import pluggy

if TYPE_CHECKING:
    from arb_ternary.backends.select import use_backend
    from arb_ternary.plugins.manager import manager
    from arb_ternary.ternary.embedding import TernaryEmbedding, TernaryRMSNorm
    from arb_ternary.ternary.linear import TernaryLinear
    from arb_ternary.ternary.models import reset_runtime_state

__version__ = "0.1.0"

#: Version of the plugin interface (major, minor). A plugin declares the version that it was written
#: for as ``ARB_API_VERSION`` in its hook module. It is loaded if the major version is the same and
#: the minor version is no newer.
API_VERSION: Final = (1, 0)

#: Marks a function of a plugin's hook module as the implementation of a hook.
hookimpl: Final = pluggy.HookimplMarker("arb_ternary")

_LAZY: Final = {
    "TernaryEmbedding": "arb_ternary.ternary.embedding",
    "TernaryLinear": "arb_ternary.ternary.linear",
    "TernaryRMSNorm": "arb_ternary.ternary.embedding",
    "manager": "arb_ternary.plugins.manager",
    "reset_runtime_state": "arb_ternary.ternary.models",
    "use_backend": "arb_ternary.backends.select",
}

__all__ = [
    "API_VERSION",
    "TernaryEmbedding",
    "TernaryLinear",
    "TernaryRMSNorm",
    "__version__",
    "hookimpl",
    "manager",
    "reset_runtime_state",
    "use_backend",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if not name.startswith("_"):
        from arb_ternary.plugins.discovery import announced, install_command
        from arb_ternary.plugins.metadata import entry_points
        from arb_ternary.specs import resolve

        if target := entry_points("arb_ternary.names").get(name):
            return resolve(target)
        if source := announced().get(f"name.{name}"):
            raise ImportError(f"{__name__}.{name} is not installed: {install_command(source)}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
