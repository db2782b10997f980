"""What goes wrong with gradients."""

from __future__ import annotations

from arb_ternary.errors import ArbError, ConfigError


class NonFiniteGradientError(ArbError):
    """A gradient, a metric or a loss is not finite under the policy ``"raise"``; the sum is without
    it.
    """


class PendingGradientError(ArbError, NotImplementedError):
    """Somebody tried to clear gradients that a wrapper has not used yet; in torch-gqc a
    NotImplementedError.
    """


class WrapperOptionError(ConfigError, ValueError):
    """An option of a wrapper is outside its range; in torch-gqc a ValueError."""
