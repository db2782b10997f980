"""What goes wrong with gradients."""

from __future__ import annotations

from arb_ternary.errors import ArbError

__all__ = ["NonFiniteGradientError", "PendingGradientError"]


class NonFiniteGradientError(ArbError):
    """A gradient, a metric or a loss is not finite under the policy ``"raise"``; the sum is without it."""


class PendingGradientError(ArbError):
    """Somebody tried to clear gradients that a wrapper has not used yet."""
