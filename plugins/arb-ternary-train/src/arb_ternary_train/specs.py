"""Deprecated: the kinds of component are in ``arb_ternary.specs``."""

from __future__ import annotations

import warnings
from typing import Any

from arb_ternary import specs

#: Names that moved to ``arb_ternary.specs``.
_MOVED = (
    "CheckSpec",
    "ExporterSpec",
    "GeneratorSpec",
    "ImporterSpec",
    "PolicySpec",
    "StarterSpec",
    "TrackerSpec",
)


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"arb_ternary_train.specs.{name} has moved: import it from arb_ternary.specs",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(specs, name)
