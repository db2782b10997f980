"""Finding strategies by name, and comparing what they do to a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ComponentError, UsageProblem, nearest
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import load_target
from arb_ternary_orchestrator.built_in import STRATEGIES
from arb_ternary_orchestrator.hookspecs import arb_register_strategies
from arb_ternary_orchestrator.strategies.strategy import Strategy
from arb_ternary_orchestrator.strategies.transform import is_float, is_ternary, leaves_of


def strategies_named(
    initial: str, safety: str, strategies: Iterable[str] | None
) -> tuple[str, ...]:
    """Return the strategies that a run chooses among, by its options; the initial one first.

    None stands for the built-in ones. Strategies of other distributions have to be named:
    installing a distribution changes no run.
    """
    others = STRATEGIES if strategies is None else strategies
    return tuple(dict.fromkeys((initial, safety, *others)))


def find_strategy(name: str) -> Strategy:
    """Return the strategy ``name``.

    Raises:
        UsageProblem: there is none; the hint names the nearest and lists all.
        EnvironmentProblem: two plugins have one of this name.
        ComponentError: what a plugin registered is not a strategy.
    """
    registry = manager().registry
    found = registry.by_name(arb_register_strategies.__name__)
    if name not in found:
        close = nearest(name, found)
        hints = [f"did you mean {close!r}?"] if close else []
        hints.append(f"available: {', '.join(found)}")
        failed = [record.described for record in registry.records if not record.loaded]
        if failed:
            hints.append(f"plugins that are not loaded: {', '.join(failed)}")
        raise UsageProblem(f"no strategy is called {name!r}", "\n".join(hints))
    target = found[name].target
    strategy = load_target(f"strategy '{name}':", target)
    if not isinstance(strategy, Strategy):
        strategy = strategy()
    if not isinstance(strategy, Strategy) or strategy.name != name:
        raise ComponentError(f"strategy {name!r}: {target} is no Strategy of this name")
    return strategy


def effect(
    strategy: Strategy, configured: OptimizerChoice, kinds: Collection[str]
) -> tuple[Any, ...]:
    """Return what ``strategy`` makes of a run: rules, rates and clipping. Two strategies that do
    the same have equal effects.

    Args:
        strategy: the strategy.
        configured: the run's optimizer.
        kinds: kinds of the parts that are trained: ``ternary``, ``float``.
    """
    floats = "float" in kinds
    voted = "ternary" in kinds
    adjustment = strategy.adjustment(configured)
    rules = []
    for leaf in leaves_of(configured):
        idle = (is_float(leaf) and not floats) or (is_ternary(leaf) and not voted)
        if not idle:
            rules.append(to_plain(strategy.leaf(leaf), given=False))
    return (
        rules,
        adjustment.float_rate if floats else 1.0,
        adjustment.ternary_rate if voted else 1.0,
        adjustment.grad_clip if floats else "configured",
    )


def strategies_of(
    initial: str,
    safety: str,
    strategies: Iterable[str] | None,
    configured: OptimizerChoice,
    kinds: Collection[str],
) -> tuple[Strategy, ...]:
    """Return the strategies of :func:`strategies_named`. Of built-in ones with equal effects the
    first is left.

    Args:
        initial, safety, strategies: options of the run.
        configured: the run's optimizer.
        kinds: kinds of the parts that are trained: ``Planned.kinds``, or the keys of
            ``Trainable.parts``.

    Raises:
        UsageProblem: a strategy does not exist.
    """
    found = [find_strategy(name) for name in strategies_named(initial, safety, strategies)]
    if strategies is not None:
        return tuple(found)
    kept: list[Strategy] = []
    seen: list[tuple[Any, ...]] = []
    for strategy in found:
        what = effect(strategy, configured, kinds)
        if what not in seen or strategy.name in (initial, safety):
            kept.append(strategy)
        seen.append(what)
    return tuple(kept)
