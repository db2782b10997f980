"""What the core itself provides, registered through the same hooks as anyone else's plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import BackendSpec, CommandSpec

ARB_API_VERSION = (1, 3)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "the torch backend and the commands that explain an installation"}


@hookimpl
def arb_register_backends() -> Sequence[BackendSpec]:
    return (
        BackendSpec(
            name="torch",
            target="arb_ternary.backends.reference:build",
            probe="arb_ternary.backends.reference_probe:probe",
            priority=0,
            devices=("cpu", "cuda", "mps"),
            summary="reference kernels in torch, right everywhere",
        ),
    )


@hookimpl
def arb_register_commands() -> Sequence[CommandSpec]:
    return (
        CommandSpec(
            name="config",
            target="arb_ternary.cli.config_commands:config",
            summary="Write, check and explain config files.",
        ),
        CommandSpec(
            name="plugins",
            target="arb_ternary.cli.plugins_commands:plugins",
            summary="List, inspect, check and write plugins.",
        ),
        CommandSpec(
            name="backends",
            target="arb_ternary.cli.backends_commands:backends",
            summary="List the kernel backends and explain the choice.",
        ),
        CommandSpec(
            name="doctor", target="arb_ternary.cli.doctor:doctor", summary="Say what works here and what does not."
        ),
    )
