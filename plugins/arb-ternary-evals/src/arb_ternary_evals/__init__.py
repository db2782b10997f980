"""Language models on the tasks of lm-evaluation-harness.

The public name is that of ``arb_ternary``: ``evaluate_tasks``.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
