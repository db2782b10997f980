"""Several runs in one file: manifests, and the command ``arb run``."""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
