"""Hook implementations of the conformance kit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import CommandSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "conformance suites for components, and a scaffold for new plugins"}


@hookimpl
def arb_register_commands() -> Sequence[CommandSpec]:
    return (
        CommandSpec(
            name="plugins.check",
            target="arb_ternary_testing.commands:check",
            summary="Run the conformance kit on a plugin.",
        ),
        CommandSpec(
            name="plugins.new",
            target="arb_ternary_testing.commands:new",
            summary="Write a new plugin.",
        ),
    )
