"""Strategies by name, and which of them make a difference to a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ComponentError
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import load_target
from arb_ternary_orchestrator.built_in import STRATEGIES
from arb_ternary_orchestrator.strategies.strategy import Strategy
from arb_ternary_orchestrator.strategies.transform import is_float, is_ternary, leaves_of
from arb_ternary_orchestrator.telemetry import Phase

#: By how much the score of a strategy rises in a phase of training that it suits.
PREFERENCE: Final = 1.25


def strategies_named(
    initial: str, safety: str, strategies: Iterable[str] | None
) -> tuple[str, ...]:
    """What a run chooses among by its options of these names, the initial one first; some may not
    fit its model.

    None stands for the built-in ones. Those of other distributions are named, or take no part: what
    is merely installed changes no run.
    """
    return tuple(
        dict.fromkeys((initial, safety, *(STRATEGIES if strategies is None else strategies)))
    )


def find_strategy(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        UsageProblem: there is none; it names the nearest and lists all.
        EnvironmentProblem: its plugin is not installed, or was not loaded.
        ComponentError: what a plugin registered is no strategy.
    """
    target = manager().registry.get("strategy", name).spec.target
    found = load_target(f"strategy '{name}':", target)
    if not isinstance(found, Strategy):
        found = found()
    if not isinstance(found, Strategy) or found.name != name:
        raise ComponentError(f"strategy {name!r}: {target} is no Strategy of this name")
    return found


def effect(
    strategy: Strategy, configured: OptimizerChoice, kinds: Collection[str]
) -> tuple[Any, ...]:
    """What ``strategy`` makes of the parts of a model: rules, rates and clipping. Equal where two
    do the same.

    Args:
        strategy: any.
        configured: the run's optimizer.
        kinds: of the parts that are trained: ``ternary``, ``float``, ``stored``.
    """
    floats = "float" in kinds
    voted = bool({"ternary", "stored"} & set(kinds))
    adjustment = strategy.adjustment(configured)
    rules = [
        to_plain(strategy.leaf(leaf), given=False)
        for leaf in leaves_of(configured)
        if (floats or not is_float(leaf)) and (voted or not is_ternary(leaf))
    ]
    return (
        rules,
        adjustment.float_rate if floats else 1.0,
        adjustment.ternary_rate if voted else 1.0,
        adjustment.grad_clip if floats else "configured",
    )


def applicable(
    strategies: Iterable[Strategy], configured: OptimizerChoice, kinds: Collection[str]
) -> tuple[Strategy, ...]:
    """Those of ``strategies`` that differ from each other in a run, in order; of several that are
    alike the first.

    Args:
        strategies: some, best with ``configured`` first.
        configured: the run's optimizer.
        kinds: of the parts that are trained: ``Planned.kinds``, or the keys of ``Trainable.parts``.
    """
    found: list[Strategy] = []
    seen: list[tuple[Any, ...]] = []
    for strategy in strategies:
        what = effect(strategy, configured, kinds)
        if what not in seen:
            seen.append(what)
            found.append(strategy)
    return tuple(found)


def preferences(strategies: Iterable[Strategy], phase: Phase) -> dict[str, float]:
    """The factor of each strategy that suits ``phase``, by name: what ``Bandit.choose`` takes as
    its context.
    """
    return {strategy.name: PREFERENCE for strategy in strategies if phase in strategy.suits}
