"""The spec by which a plugin adds strategies."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class StrategySpec:
    """A strategy that the orchestrator may switch to.

    Attributes:
        name: what a config calls it.
        target: ``"module:attribute"``: a ``Strategy`` (``arb_ternary_orchestrator.strategies``) of
            this name, or a function without arguments that returns one. It is imported when a run
            names the strategy.
        summary: one line for listings.
    """

    name: str
    target: str
    summary: str = ""
