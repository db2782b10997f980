"""SignGSD: a sign optimizer without state."""

from __future__ import annotations

__version__ = "0.1.0"
