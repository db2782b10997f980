"""The hook of the orchestrator, which other plugins can implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from arb_ternary.hookspecs import hookspec

if TYPE_CHECKING:
    from arb_ternary_orchestrator.specs import StrategySpec


@hookspec
def arb_register_strategies() -> Sequence[StrategySpec]:
    """Register strategies that the orchestrator may switch to.

    A strategy takes part in a run only if the run's config names it. Called once, when the plugins
    are loaded. None or an empty sequence means that the plugin has no strategy.
    """
    return ()
