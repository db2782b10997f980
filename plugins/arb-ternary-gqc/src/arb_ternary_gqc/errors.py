"""Errors of the wrappers."""

from __future__ import annotations

from arb_ternary.errors import ArbError, ConfigError


class NonFiniteGradientError(ArbError):
    """A gradient, metric or loss is not finite under ``non_finite="raise"``; it was dropped."""


class PendingGradientError(ArbError, NotImplementedError):
    """``zero_grad`` would clear gradients that a wrapper has not used yet.

    torch-gqc raises NotImplementedError.
    """


class WrapperOptionError(ConfigError, ValueError):
    """An option of a wrapper is outside its range; torch-gqc raises ValueError."""
