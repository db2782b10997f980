"""Strategies that a run may switch to."""

from arb_ternary_orchestrator.strategies.lookup import (
    applicable,
    effect,
    find_strategy,
    preferences,
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
    "applicable",
    "chosen",
    "effect",
    "find_strategy",
    "map_leaves",
    "preferences",
    "strategies_named",
    "with_options",
    "wrap_floats",
]
