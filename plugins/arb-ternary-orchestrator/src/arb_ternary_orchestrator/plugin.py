"""Hook implementations of the orchestrator plugin."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from arb_ternary import hookimpl
from arb_ternary.specs import CommandSpec, OptimizerSpec, PolicySpec
from arb_ternary_orchestrator import hookspecs
from arb_ternary_orchestrator.built_in import STRATEGIES
from arb_ternary_orchestrator.specs import StrategySpec

ARB_API_VERSION = (1, 0)

#: Factory, options and summary of each optimizer, in ``arb_ternary_orchestrator.optim``.
_OPTIMIZERS = {
    "lion": (
        "build:build_lion",
        "LionConfig",
        "steps by the sign of an interpolated momentum; one buffer per parameter",
    ),
    "sgd": ("build:build_sgd", "SGDConfig", "torch's gradient descent with momentum"),
    "swats": (
        "build:build_swats",
        "SWATSConfig",
        "Adam, until the rate that SGD would need has settled; then SGD",
    ),
    "adagc": (
        "adagc:AdaGC.build",
        "AdaGCConfig",
        "wrapper: clips each parameter's gradient by the average of its own clipped norms",
    ),
    "gradient_smoother": (
        "gradient_smoother:GradientSmoother.build",
        "GradientSmootherConfig",
        "wrapper: replaces each gradient by an average of gradients",
    ),
    "gradient_noise": (
        "gradient_noise:GradientNoise.build",
        "GradientNoiseConfig",
        "wrapper: adds decaying noise to gradients",
    ),
    "nowcasting": (
        "nowcasting:Nowcasting.build",
        "NowcastingConfig",
        "wrapper: periodically moves weights to their predicted values",
    ),
}


@hookimpl
def arb_register_hooks() -> Sequence[ModuleType]:
    return (hookspecs,)


@hookimpl
def arb_register_optimizers() -> Sequence[OptimizerSpec]:
    return tuple(
        OptimizerSpec(
            name=name,
            target=f"arb_ternary_orchestrator.optim.{factory}",
            config=f"arb_ternary_orchestrator.optim.config:{config}",
            summary=summary,
            accepts=frozenset({"float"}),
        )
        for name, (factory, config, summary) in _OPTIMIZERS.items()
    )


@hookimpl
def arb_register_commands() -> Sequence[CommandSpec]:
    return (
        CommandSpec(
            name="orchestrator",
            target="arb_ternary_orchestrator.cli:orchestrator",
            summary="Explain the decisions of orchestrated runs, and switch strategies by hand.",
        ),
    )


@hookimpl
def arb_register_policies() -> Sequence[PolicySpec]:
    return (
        PolicySpec(
            name="orchestrator",
            target="arb_ternary_orchestrator.policy:Orchestrator",
            config="arb_ternary_orchestrator.config:OrchestratorConfig",
            summary="compares strategies during training, keeps the steps of the best, and rolls "
            "back explosions",
        ),
    )


@hookimpl
def arb_register_strategies() -> Sequence[StrategySpec]:
    return tuple(
        StrategySpec(
            name=name,
            target=f"arb_ternary_orchestrator.strategies.portfolio:{name}",
            summary=summary,
        )
        for name, summary in STRATEGIES.items()
    )
