"""Hook implementations of the orchestrator plugin."""

from __future__ import annotations

from collections.abc import Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import CommandSpec, OptimizerSpec

ARB_API_VERSION = (1, 0)

_OPTIMIZERS = {
    "lion": ("LionConfig", "steps by the sign of an interpolated momentum; one buffer a parameter"),
}


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
            summary="tell what was decided in a run, and switch strategies by hand",
        ),
    )
