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

_OPTIMIZERS = {
    "lion": (
        "LionConfig",
        "steps by the sign of an interpolated momentum; one buffer per parameter",
    ),
    "sgd": ("SGDConfig", "torch's gradient descent with momentum"),
    "swats": ("SWATSConfig", "Adam, until the rate that SGD would need has settled; then SGD"),
    "adagc": (
        "AdaGCConfig",
        "wrapper: clips each parameter's gradient by the average of its own clipped norms",
    ),
    "gradient_smoother": (
        "GradientSmootherConfig",
        "wrapper: replaces each gradient by an average of gradients",
    ),
    "gradient_noise": ("GradientNoiseConfig", "wrapper: adds decaying noise to gradients"),
    "nowcasting": (
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
            target=f"arb_ternary_orchestrator.optim.build:build_{name}",
            config=f"arb_ternary_orchestrator.optim.config:{config}",
            summary=summary,
            accepts=frozenset({"float"}),
        )
        for name, (config, summary) in _OPTIMIZERS.items()
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
