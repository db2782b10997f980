"""Strategies that a run may switch to."""

from arb_ternary_orchestrator.strategies.lookup import (
    effect,
    find_strategy,
    strategies_named,
)
from arb_ternary_orchestrator.strategies.strategy import Strategy
from arb_ternary_orchestrator.strategies.transform import (
    chosen,
    map_leaves,
    with_options,
    wrap_floats,
)

__all__ = [
    "Strategy",
    "chosen",
    "effect",
    "find_strategy",
    "map_leaves",
    "strategies_named",
    "with_options",
    "wrap_floats",
]
