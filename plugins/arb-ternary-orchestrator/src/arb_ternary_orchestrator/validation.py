"""Contradictions between the options of the orchestrator and a run, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from arb_ternary.errors import ArbError
from arb_ternary_orchestrator.strategies.lookup import effect, find_strategy
from arb_ternary_orchestrator.strategies.transform import is_float, leaves_of, wrap_floats
from arb_ternary_train.capabilities import has_own_loops

if TYPE_CHECKING:
    from arb_ternary.optim.protocol import Planned
    from arb_ternary_orchestrator.config import OrchestratorConfig

#: Why each of these options needs float parameters.
_NEEDS_FLOATS = {
    "use_adagc": "AdaGC clips gradients, and votes do not depend on the norm of a gradient",
    "use_nowcasting": "nowcasting extrapolates the trajectory of a weight, and trits have none, "
    "they flip by votes",
}


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
        where = f"the phase {phase.name!r}"
        steps = getattr(phase.options, "steps", None)
        if has_own_loops(phase.options):
            where = f"each loop of {where}"
            steps = phase.options.steps_of_loop
        if steps is not None and steps < options.eval_horizon:
            yield (
                "eval_horizon",
                f"{options.eval_horizon} steps are more than the {steps} of {where}, so that no "
                f"strategy could be tried; give at most {max(1, steps // 4)}",
            )


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
