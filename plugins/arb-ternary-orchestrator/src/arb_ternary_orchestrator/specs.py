"""The kind of component that orchestrated training adds."""

from __future__ import annotations

from attrs import frozen

from arb_ternary.specs import Spec


@frozen(kw_only=True)
class StrategySpec(Spec):
    """A way to go on training, which the orchestrator may switch to.

    Target: a ``Strategy`` (``arb_ternary_orchestrator.strategies``), or a function without
    arguments that returns one; its ``name`` is that of the spec.
    """

    kind = "strategy"
    hook = "arb_register_strategies"
    noun = "strategy"
