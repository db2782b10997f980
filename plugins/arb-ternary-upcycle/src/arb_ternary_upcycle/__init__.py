"""Turns pretrained float models into ternary ones: reads, rotates, rounds and trains them."""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
