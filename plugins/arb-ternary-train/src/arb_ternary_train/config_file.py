"""Deprecated: config files are loaded by ``arb_ternary.config.loading``."""

from __future__ import annotations

import warnings
from typing import Any

from arb_ternary.config import loading, overrides


def __getattr__(name: str) -> Any:
    for module in (loading, overrides):
        if not name.startswith("_") and hasattr(module, name):
            warnings.warn(
                f"arb_ternary_train.config_file.{name} has moved: import it from {module.__name__}",
                DeprecationWarning,
                stacklevel=2,
            )
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
