"""The commands ``arb data``: look at data as a model reads it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from arb_ternary.cli.options import plugin_files

if TYPE_CHECKING:
    from arb_ternary_chat.shown import Span
    from arb_ternary_text.chat.packing import TooLong

#: Colours of text that is learned, and of control tokens.
_LEARNED = "green"
_CONTROL = "magenta"


@click.group()
def data() -> None:
    """Look at data, and prepare it."""


@data.command()
@click.argument("conversations")
@click.option(
    "--model",
    "source",
    required=True,
    metavar="SOURCE",
    help="A run, a checkpoint, a GGUF file, a Hugging Face folder, or hf://org/name.",
)
@click.option(
    "--first",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="How many conversations are printed.",
)
@click.option(
    "--block-size",
    type=click.IntRange(min=2),
    default=1024,
    show_default=True,
    help="Predictions of a row, as in a config.",
)
@click.option(
    "--too-long",
    type=click.Choice(["cut", "split", "drop"]),
    default="split",
    show_default=True,
    help="What becomes of a conversation longer than a row, as in a config.",
)
@plugin_files
def show(conversations: str, source: str, first: int, block_size: int, too_long: TooLong) -> None:
    """Print the first of CONVERSATIONS as the model reads them, and statistics of all.

    CONVERSATIONS is a .jsonl, .json, .csv or .parquet file, a folder of them, or a glob pattern.
    What the model learns to write is green, control tokens are magenta; without colours it stands
    in « ».
    """
    from arb_ternary.cli.output import print_table
    from arb_ternary_chat.model import load_tokenizer
    from arb_ternary_chat.shown import encode_all, measured, spans
    from arb_ternary_text.chat.conversations import read_conversations
    from arb_ternary_text.chat.template import chat_template

    tokenizer = load_tokenizer(source)
    found = read_conversations(conversations)
    has_messages = any(each.messages for each in found.items)
    template = chat_template(tokenizer) if has_messages else None
    encoded = encode_all(tokenizer, template, found.items)
    coloured = sys.stdout.isatty()
    for conversation, tokens in list(zip(found.items, encoded, strict=True))[:first]:
        click.secho(f"{conversation.origin}: {len(tokens.ids)} tokens", bold=True)
        for span in spans(tokenizer, tokens):
            _print_span(span, coloured)
        click.echo("\n")
    statistics = measured(found.items, encoded, block_size + 1, too_long)
    print_table(("conversations", conversations), statistics.table())


def _print_span(span: Span, coloured: bool) -> None:
    if not coloured:
        click.echo(f"«{span.text}»" if span.learned else span.text, nl=False)
        return
    colour = _LEARNED if span.learned else None
    if span.control:
        colour = _CONTROL
    click.secho(span.text, fg=colour, bold=span.learned and span.control, nl=False)
