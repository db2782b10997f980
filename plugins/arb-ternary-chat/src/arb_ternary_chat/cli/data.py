"""The commands ``arb data``: look at data as a model reads it, and prepare it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from arb_ternary.cli.options import plugin_files

if TYPE_CHECKING:
    from arb_ternary_chat.shown import Span
    from arb_ternary_text.chat.packing import TooLong
    from arb_ternary_text.data.documents import Corpus
    from arb_ternary_text.data.tokenizers import Tokenizer

#: Colours of text that is learned, and of control tokens.
_LEARNED = "green"
_CONTROL = "magenta"

column_option = click.option(
    "--column",
    default="text",
    show_default=True,
    help="Key of the text in .jsonl and .parquet files.",
)
separator_option = click.option(
    "--separator",
    metavar="TEXT",
    help="What stands between the documents of a .txt file; default: a file is one document.",
)


@click.group()
def data() -> None:
    """Look at data, and prepare it."""


@data.command()
@click.argument("conversations", type=click.Path())
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
    from arb_ternary_chat.shown import measured, spans
    from arb_ternary_text.chat.answers import encode_conversation
    from arb_ternary_text.chat.conversations import read_conversations
    from arb_ternary_text.chat.template import chat_template

    tokenizer = load_tokenizer(source)
    found = read_conversations(conversations)
    has_messages = any(each.messages for each in found.items)
    template = chat_template(tokenizer) if has_messages else None
    encoded = [encode_conversation(tokenizer, template, each) for each in found.items]
    coloured = sys.stdout.isatty()
    for conversation, tokens in list(zip(found.items, encoded, strict=True))[:first]:
        click.secho(f"{conversation.origin}: {len(tokens.ids)} tokens", bold=True)
        for span in spans(tokenizer, tokens):
            _print_span(span, coloured)
        click.echo("\n")
    statistics = measured(found.items, encoded, tokenizer.vocabulary_size, block_size + 1, too_long)
    print_table(("conversations", conversations), statistics.table())


@data.command()
@click.argument("sources", nargs=-1, required=True, type=click.Path())
@click.option(
    "--tokenizer",
    required=True,
    metavar="FILE|SOURCE",
    help="A tokenizer.json or .model file, bytes, or a model: a run, a GGUF file, a folder.",
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="A new folder."
)
@column_option
@separator_option
@plugin_files
def prepare(
    sources: tuple[str, ...], tokenizer: str, out: Path, column: str, separator: str | None
) -> None:
    """Write the tokens of SOURCES, .txt, .jsonl or .parquet files or folders of them, to a folder.

    Runs map the folder into memory: `data: {name: tokens, train: FOLDER}`. Equal documents are
    written once. Memory does not grow with the text. Interrupted, the same command goes on.
    """
    from arb_ternary.cli.output import print_table
    from arb_ternary_text.data.prepare import prepare as write

    corpus = _corpus(sources, column, separator)
    length = sum(_length(file) for file in corpus.files)
    with click.progressbar(length=length, label="reading", file=sys.stderr) as bar:
        done = write(corpus, _named_tokenizer(tokenizer), out, observe=bar.update)
        bar.update(length - bar.pos)
    print_table(("tokens", str(out)), done.table())


@data.command("tokenizer")
@click.argument("sources", nargs=-1, required=True, type=click.Path())
@click.option("--vocabulary-size", type=click.IntRange(min=257), default=8192, show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="A .json file."
)
@click.option(
    "--special",
    multiple=True,
    default=("<|endoftext|>",),
    show_default=True,
    help="A control token; the first one ends documents. Repeatable.",
)
@click.option(
    "--chat",
    is_flag=True,
    help="Add the control tokens and the template of ChatML, for a model that will chat.",
)
@column_option
@separator_option
def train_tokenizer(
    sources: tuple[str, ...],
    vocabulary_size: int,
    out: Path,
    special: tuple[str, ...],
    chat: bool,
    column: str,
    separator: str | None,
) -> None:
    """Train a tokenizer, a byte-level BPE, on the documents of SOURCES."""
    from arb_ternary.errors import UsageProblem
    from arb_ternary_text.data.train_tokenizer import train_bpe
    from arb_ternary_train.directory import write_json

    if out.suffix != ".json":
        raise UsageProblem(f"{out}: the file of a tokenizer ends in .json")
    if out.exists():
        raise UsageProblem(f"{out}: exists already", "Choose another name.")
    corpus = _corpus(sources, column, separator)
    tokenizer = train_bpe(corpus, vocabulary_size, special, chat=chat)
    write_json(out, tokenizer.to_json())
    click.echo(f"{out}: {tokenizer.vocabulary_size:,} ids")


def _corpus(sources: tuple[str, ...], column: str, separator: str | None) -> Corpus:
    from arb_ternary.errors import UsageProblem
    from arb_ternary_text.data.documents import Corpus, find_documents

    if separator == "":
        raise UsageProblem("--separator: it must not be empty", "Leave it out.")
    return Corpus(find_documents(sources), column, separator)


def _length(file: Path) -> int:
    """Return what the progress of reading a file is counted in: bytes, or rows of Parquet."""
    if file.suffix.lower() != ".parquet":
        return file.stat().st_size
    from arb_ternary_text.data.documents import rows_of

    return rows_of(file)


def _named_tokenizer(name: str) -> Tokenizer:
    from arb_ternary_chat.model import load_tokenizer
    from arb_ternary_text.data.tokenizers import build_tokenizer

    if name == "bytes" or name.endswith((".json", ".model")):
        return build_tokenizer(name)
    return load_tokenizer(name)


def _print_span(span: Span, coloured: bool) -> None:
    if not coloured:
        click.echo(f"«{span.text}»" if span.learned else span.text, nl=False)
        return
    colour = _LEARNED if span.learned else None
    if span.control:
        colour = _CONTROL
    click.secho(span.text, fg=colour, bold=span.learned and span.control, nl=False)
