"""The command ``arb chat``: talk to a language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from arb_ternary_text.cli.options import sampling_options, stop_option
from arb_ternary_train.cli.options import load_options
from arb_ternary_train.openmp import wait_passively

if TYPE_CHECKING:
    from arb_ternary_chat.model import Model


@click.command()
@click.argument("source", type=click.Path())
@click.option("--system", metavar="TEXT", help="System message: how the model should answer.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Longest answer.",
)
@click.option(
    "--context",
    type=click.IntRange(min=16),
    help="Tokens of a conversation to keep; default: as many as the model reads.",
)
@stop_option
@sampling_options
@load_options
def chat(
    source: str,
    system: str | None,
    max_new_tokens: int,
    context: int | None,
    stops: tuple[str, ...],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    backend: str | None,
    device: str | None,
) -> None:
    """Talk to the model of SOURCE: a run, a checkpoint, a GGUF file, a Hugging Face folder, or
    hf://org/name.

    /help lists what can be typed besides. In a pipe, each line is a turn, and only answers are
    printed.
    """
    wait_passively()
    from arb_ternary_chat.console import Console
    from arb_ternary_chat.model import load_model
    from arb_ternary_chat.session import Session

    model = load_model(source, device=device, backend=backend)
    _require_template(model, system)
    sampling = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": stops,
    }
    session = Session(model, system=system, sampling=sampling, context=context)
    Console(session).run()


def _require_template(model: Model, system: str | None) -> None:
    from arb_ternary.errors import UsageProblem

    if system is not None and model.special.chat_template is None:
        raise UsageProblem(
            f"--system: {model.source} has no chat template, so it knows no system message",
            "Leave the option out: the model continues plain text.",
        )
