"""Register the command of the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import CommandSpec
from arb_ternary_serve.settings import VARIABLES

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "language models for programs that speak the OpenAI API"}


@hookimpl
def arb_register_commands() -> Sequence[CommandSpec]:
    return (
        CommandSpec(
            name="serve",
            target="arb_ternary_serve.cli.serve:serve",
            summary="Answer requests of the OpenAI API with language models.",
            variables=VARIABLES,
        ),
    )
