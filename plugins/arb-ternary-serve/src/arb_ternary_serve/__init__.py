"""A server of language models, and the engine that continues many sequences together.

:class:`~arb_ternary_serve.engine.Engine` continues them; what is asked of a sequence and what
happens to it is in :mod:`arb_ternary_serve.sequence`.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
