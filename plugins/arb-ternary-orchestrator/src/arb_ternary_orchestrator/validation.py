"""Checks of the options of the orchestrator in a run, before anything is built: contradictions,
and how many comparisons there will be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from arb_ternary.errors import ArbError
from arb_ternary_orchestrator.strategies.lookup import effect, find_strategy, strategies_of
from arb_ternary_orchestrator.strategies.transform import is_float, leaves_of, wrap_floats
from arb_ternary_train.capabilities import has_own_loops, planned_steps

if TYPE_CHECKING:
    from arb_ternary.optim.protocol import Planned
    from arb_ternary_orchestrator.config import OrchestratorConfig

#: Why each of these options needs float parameters.
_NEEDS_FLOATS = {
    "use_adagc": "AdaGC clips gradients, and votes do not depend on the norm of a gradient",
    "use_nowcasting": "nowcasting extrapolates the trajectory of a weight, and trits have none, "
    "they flip by votes",
}


def share_lost(lost: int, steps: int) -> float:
    """Return the share of all steps that candidates lose in a loop of ``steps`` steps."""
    return lost / (lost + steps)


def planned_comparisons(
    options: OrchestratorConfig, run: Any, phase: Any, planned: Planned | None
) -> str | None:
    """Return a sentence that says how many comparisons a phase with these options will make, and
    what would give the first if it makes none; None if that is only known when it runs.

    Args:
        options: the options of the policy.
        run: the ``RunConfig``.
        phase: the phase, one of its ``phases``.
        planned: what the run trains; None if its model does not say.
    """
    kinds = frozenset({"ternary", "float"}) if planned is None else planned.kinds
    where, steps = _loop_of(phase, run)
    if steps is None:
        return None

    named = options.initial_strategy, options.safety_strategy, options.strategies
    count = min(options.max_candidates, len(strategies_of(*named, run.optimizer, kinds)))
    if count < 2:
        return f"the orchestrator compares nothing: only {named[0]} fits the model"
    interval = options.decision_interval
    horizon = options.eval_horizon
    most = options.max_overhead
    lost = (count - 1) * horizon
    due = steps // (interval + horizon)
    number = 0
    while number < due and share_lost((number + 1) * lost, steps) <= most:
        number += 1
    if number:
        comparisons = "comparison" if number == 1 else "comparisons"
        return (
            f"the orchestrator makes {number} {comparisons} of {count} strategies in the "
            f"{steps:,} steps of {where}, the first after {interval} at the latest"
        )

    text = f"the orchestrator makes no comparison in the {steps:,} steps of {where}: "
    share = share_lost(lost, steps)
    enough = interval + horizon
    if share <= most:
        return (
            f"{text}the first is due after {interval} and takes {horizon}; it is made with "
            f"'steps' {enough:,}, or with a lower 'decision_interval'"
        )
    remedies = []
    if most > 0:
        enough = max(enough, math.ceil(lost * (1 - most) / most))
        remedies.append(f"'steps' {enough:,}")
        affordable = math.floor(steps * most / ((1 - most) * (count - 1)))
        if 0 < affordable <= steps - interval:
            remedies.append(f"'eval_horizon' {affordable}")
    if due:
        remedies.append(f"'max_overhead' {math.ceil(100 * share) / 100:g}")
    given = f"; one is made with {', or '.join(remedies)}" if remedies else ""
    return (
        f"{text}one of {count} strategies loses {lost:,} steps, {share:.1%} of all, and "
        f"'max_overhead' is {most:.0%}{given}"
    )


def contradictions(
    options: OrchestratorConfig, run: Any, planned: Planned | None
) -> Iterator[tuple[str, str]]:
    """Yield options and what is wrong with them; see ``arb_ternary.optim.protocol.Planned``.

    Args:
        options: the options of the policy.
        run: the ``RunConfig``, one of whose phases has these options.
        planned: what the run trains; None if its model does not say.
    """
    kinds = frozenset({"ternary", "float"}) if planned is None else planned.kinds
    yield from _steps(options, run)
    yield from _wrappers(options, run, kinds)
    yield from _strategies(options, run, kinds)


def _steps(options: OrchestratorConfig, run: Any) -> Iterator[tuple[str, str]]:
    if options.decision_interval < options.eval_horizon:
        yield (
            "decision_interval",
            f"{options.decision_interval} is below 'eval_horizon', {options.eval_horizon}: a "
            "comparison would be due before the previous one has ended",
        )
    for phase in run.phases:
        policy = getattr(phase.options, "policy", None)
        if getattr(policy, "options", None) is not options:
            continue  # another policy, or that of another phase
        loop, steps = _loop_of(phase, run)
        if steps is not None and steps < options.eval_horizon:
            where = f"{loop} of the phase {phase.name!r}".removeprefix("the loop of ")
            yield (
                "eval_horizon",
                f"{options.eval_horizon} steps are more than the {steps} of {where}, so that no "
                f"strategy could be tried; give at most {max(1, steps // 4)}",
            )


def _loop_of(phase: Any, run: Any) -> tuple[str, int | None]:
    """Return which loop of a phase has an orchestrator, in words, and its steps if known."""
    if has_own_loops(phase.options):
        return "each loop", phase.options.steps_of_loop
    return "the loop", planned_steps(phase.options, run)


def _wrappers(
    options: OrchestratorConfig, run: Any, kinds: frozenset[str]
) -> Iterator[tuple[str, str]]:
    missing = None
    if "float" not in kinds:
        missing = "the model has no float parameters"
    elif not any(map(is_float, leaves_of(run.optimizer))):
        missing = "no optimizer is of float parameters alone"
    for key, why in _NEEDS_FLOATS.items():
        wrapper = key.removeprefix("use_")
        if not getattr(options, key):
            continue
        if missing is not None:
            yield key, f"{missing}: {why}; remove it"
        elif wrap_floats(run.optimizer, wrapper) == run.optimizer:
            yield (
                key,
                f"the optimizer has {wrapper!r} around its float parameters already, with its own "
                f"options; remove it",
            )


def _strategies(
    options: OrchestratorConfig, run: Any, kinds: frozenset[str]
) -> Iterator[tuple[str, str]]:
    named = [
        ("initial_strategy", options.initial_strategy),
        ("safety_strategy", options.safety_strategy),
    ]
    named += [("strategies", name) for name in options.strategies or ()]
    trained = " and ".join(sorted(kinds))
    seen: list[tuple[str, tuple[Any, ...]]] = []  # names and effects of `strategies`
    for key, name in named:
        try:
            what = effect(find_strategy(name), run.optimizer, kinds)
            plain = effect(find_strategy("configured"), run.optimizer, kinds)
        except ArbError as error:
            yield key, f"{error.what}; {'; '.join(error.hint.splitlines())}"
            continue
        except ValueError as error:
            yield key, f"{name!r} does not go with the optimizer {run.optimizer.name!r}: {error}"
            continue
        if name != "configured" and what == plain:
            yield (
                key,
                f"{name!r} changes nothing of what this run trains ({trained} parts); remove it",
            )
        elif key == "strategies":
            for twin, other in seen:
                if other == what:
                    yield (
                        key,
                        f"{name!r} does to the {trained} parts of this model what {twin!r} does; "
                        f"keep one of them",
                    )
                    break
            seen.append((name, what))
