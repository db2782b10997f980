"""What is wrong with the options of the orchestrator in a run, said before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from arb_ternary.config.fields import without_effect
from arb_ternary.errors import ArbError
from arb_ternary_orchestrator.strategies.lookup import effect, find_strategy
from arb_ternary_orchestrator.strategies.transform import is_float, leaves_of, wrap_floats
from arb_ternary_train.protocols import PlansLoops

if TYPE_CHECKING:
    from arb_ternary.optim.protocol import Planned
    from arb_ternary_orchestrator.config import OrchestratorConfig
    from arb_ternary_orchestrator.strategies.strategy import Strategy


def contradictions(
    options: OrchestratorConfig, run: Any, planned: Planned | None
) -> Iterator[tuple[str, str]]:
    """Option and what is wrong with it; see ``arb_ternary.optim.protocol.Planned``.

    Args:
        options: of the policy.
        run: the ``RunConfig``, one of whose phases has these options.
        planned: what the run trains; None where its model does not tell.
    """
    if options.decision_interval < options.eval_horizon:
        yield (
            "decision_interval",
            f"{options.decision_interval} is below 'eval_horizon', {options.eval_horizon}: a "
            "comparison would be due before the one before it has ended",
        )
    for phase in run.phases:
        policy = getattr(phase.options, "policy", None)
        # the policy of another phase may be something else
        if getattr(policy, "options", None) is not options:
            continue
        each = isinstance(phase.options, PlansLoops)
        steps = phase.options.steps_of_loop if each else getattr(phase.options, "steps", None)
        if steps is not None and steps < options.eval_horizon:
            yield (
                "eval_horizon",
                f"{options.eval_horizon} steps are more than the {steps} of "
                f"{'each loop of ' if each else ''}the phase {phase.name!r}, so that no strategy "
                f"could be tried; give at most {max(1, steps // 4)}",
            )
    kinds = frozenset({"ternary", "float"}) if planned is None else planned.kinds
    yield from _components(options, run, kinds)
    yield from _strategies(options, run, kinds)


def _components(
    options: OrchestratorConfig, run: Any, kinds: frozenset[str]
) -> Iterator[tuple[str, str]]:
    floats = "float" in kinds and any(map(is_float, leaves_of(run.optimizer)))
    lacks = (
        "the model has no float parameters"
        if "float" not in kinds
        else "no optimizer is of float parameters alone"
    )
    if options.use_nowcasting and not floats:
        yield (
            "use_nowcasting",
            f"{lacks}: nowcasting goes ahead along the way of a weight, and trits have none, they "
            "flip by votes; remove it",
        )
    if options.use_adagc and not floats:
        yield (
            "use_adagc",
            f"{lacks}: AdaGC clips gradients, and votes do not depend on the norm of one; remove "
            f"it",
        )
    for key, wrapper in (("use_adagc", "adagc"), ("use_nowcasting", "nowcasting")):
        if (
            floats
            and getattr(options, key)
            and wrap_floats(run.optimizer, wrapper) == run.optimizer
        ):
            yield (
                key,
                f"the optimizer has {wrapper!r} around its float parameters already, with its own "
                f"options; remove it",
            )
    if not options.use_adagc:
        yield from without_effect(
            options, "'use_adagc' is false", "adagc_warmup", "adagc_threshold"
        )


def _strategies(
    options: OrchestratorConfig, run: Any, kinds: frozenset[str]
) -> Iterator[tuple[str, str]]:
    named = [
        ("initial_strategy", options.initial_strategy),
        ("safety_strategy", options.safety_strategy),
    ]
    seen: list[Strategy] = []
    for key, name in (*named, *(("strategies", each) for each in options.strategies or ())):
        try:
            strategy = find_strategy(name)
            what = effect(strategy, run.optimizer, kinds)
            plain = effect(find_strategy("configured"), run.optimizer, kinds)
        except ArbError as error:
            yield key, f"{error.what}; {'; '.join(error.hint.splitlines())}"
            continue
        except ValueError as error:
            yield key, f"{name!r} does not go with the optimizer {run.optimizer.name!r}: {error}"
            continue
        trained = " and ".join(sorted(kinds))
        if name != "configured" and what == plain:
            yield (
                key,
                f"{name!r} changes nothing of what this run trains ({trained} parts); remove it",
            )
        elif key == "strategies":
            twin = next((s.name for s in seen if effect(s, run.optimizer, kinds) == what), None)
            if twin is not None:
                yield (
                    key,
                    f"{name!r} does to the {trained} parts of this model what {twin!r} does; keep "
                    f"one of them",
                )
            seen.append(strategy)
