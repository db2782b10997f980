"""What goes wrong when a rack is built."""

from __future__ import annotations

from arb_ternary.errors import UsageProblem

__all__ = ["TooManyStacks"]


class TooManyStacks(UsageProblem, ValueError):
    """A stack more than ``max_stacks``."""
