"""Register the commands of conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import CommandSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "language models from any source: load them, and talk to them"}


@hookimpl
def arb_register_commands() -> Sequence[CommandSpec]:
    return (
        CommandSpec(
            name="chat",
            target="arb_ternary_chat.cli.chat:chat",
            summary="Talk to a language model.",
        ),
        CommandSpec(
            name="data",
            target="arb_ternary_chat.cli.data:data",
            summary="Look at data as a model reads it.",
        ),
        CommandSpec(
            name="finetune",
            target="arb_ternary_chat.cli.finetune:finetune",
            summary="Train a language model on conversations.",
        ),
    )
