"""Ternary weights in any torch model, trained by your own training loop.

The public names are those of ``arb_ternary``: ``ternarize``, ``dense`` and ``make_optimizer``.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
