"""``arb inspect``: say what is in a model file or a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import click

from arb_ternary.cli.options import as_json, plugin_files
from arb_ternary.cli.output import print_json, print_table

#: What is shown of a description in this order, and by what name.
_ROWS: Final = {
    "format": "format",
    "architecture": "architecture",
    "vocabulary_size": "vocabulary",
    "parameters": "parameters",
    "bits_per_weight": "bits a parameter",
    "tokenizer": "tokenizer",
    "scales": "scales",
}
#: Longest text of the metadata that a line has room for.
_LONGEST: Final = 72


@click.command()
@click.argument("path")
@click.option(
    "--format",
    "name",
    metavar="NAME",
    help="Importer that reads it; default: the one that recognises it.",
)
@plugin_files
@as_json
def inspect(path: str, name: str | None, as_json: bool) -> None:
    """Say what is in PATH, a model file of any format that can be imported, a run directory or a
    checkpoint.

    Weights are not read. Bits are those of the weights and scales, without what only training
    needs.
    """
    from arb_ternary_interchange.inspection import inspect_path

    found = inspect_path(path, name)
    if as_json:
        print_json(found)
        return
    shown = [(label, text) for key, label in _ROWS.items() if (text := _text(found.get(key)))]
    print_table((path, ""), [*shown, *_metadata(found.get("metadata", {}))])
    click.echo()
    print_table(
        ("tensors of type", "tensors", "numbers", "bytes"), _types(found.get("tensors", ()))
    )
    if unmapped := found.get("unmapped", ()):
        click.echo()
        click.echo("not mapped:")
        for sentence in unmapped:
            click.echo(f"  {_printable(sentence)}")


def _printable(text: str) -> str:
    """A text of a stranger's file without what a terminal would obey."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )


def _text(value: Any) -> str:
    """A value on one line; empty where there is nothing to say."""
    if value is None or value == "":
        return ""
    if isinstance(value, bool | str):
        return _printable(str(value))
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        inner = {
            key: item for key, item in value.items() if isinstance(item, str) or type(item) is int
        }
        return _printable(
            ", ".join(
                str(item) if key == "name" else f"{key} {item}" for key, item in inner.items()
            )
        )
    return ", ".join(map(_text, value))


def _metadata(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    left = 0
    for key, value in metadata.items():
        text = _text(value) if isinstance(value, str | int | float) else ""
        if text and len(text) <= _LONGEST:
            yield _printable(key), text
        else:
            left += 1
    if left:
        yield "further metadata", f"{left}: see --json"


def _types(tensors: Any) -> list[tuple[str, ...]]:
    counts: dict[str, list[int]] = {}
    for tensor in tensors:
        elements = 1
        for size in tensor["shape"]:
            elements *= size
        sums = counts.setdefault(str(tensor["type"]), [0, 0, 0])
        for index, amount in enumerate((1, elements, tensor["bytes"])):
            sums[index] += amount
    rows = sorted(counts.items(), key=lambda item: -item[1][2])
    return [(_printable(kind), *(f"{number:,}" for number in sums)) for kind, sums in rows]
