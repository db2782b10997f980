"""Pretrained float models become ternary: read, rotated, given another attention, rounded and
trained.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
