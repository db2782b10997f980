"""Vote rules: scaled votes (the default), sign votes and momentum votes.

Public names are loaded when they are first used (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arb_ternary_votes.config import MomentumVotesConfig
    from arb_ternary_votes.momentum_votes import MomentumVotes

__version__ = "0.1.0"

_LAZY = {
    "MomentumVotes": "arb_ternary_votes.momentum_votes",
    "MomentumVotesConfig": "arb_ternary_votes.config",
}

__all__ = ["MomentumVotes", "MomentumVotesConfig", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
