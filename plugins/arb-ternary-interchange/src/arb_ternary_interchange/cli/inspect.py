"""``arb inspect``: describe a model file or a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from arb_ternary.cli.options import as_json, completes, plugin_files
from arb_ternary.cli.output import print_json, print_table

#: The keys of a description that are shown, in this order, and their labels.
_ROWS: Final = {
    "format": "format",
    "architecture": "architecture",
    "vocabulary_size": "vocabulary",
    "parameters": "parameters",
    "bits_per_weight": "bits per parameter",
    "tokenizer": "tokenizer",
    "scales": "scales",
}
#: Longest text of the metadata that fits on a line.
_LONGEST: Final = 72


@click.command()
@click.argument("path", type=click.Path())
@click.option(
    "--format",
    "name",
    metavar="NAME",
    shell_complete=completes("importer"),
    help="Importer that reads it; default: the one that recognises it.",
)
@plugin_files
@as_json
def inspect(path: str, name: str | None, as_json: bool) -> None:
    """Describe PATH, a model file of any format that can be imported, a run directory or a
    checkpoint.

    Weights are not read. Bits per parameter count weights and scales, without what only training
    needs.
    """
    from arb_ternary_interchange.inspection import inspect_path

    found = inspect_path(path, name)
    if as_json:
        print_json(found)
        return
    rows = []
    for key, label in _ROWS.items():
        text = _text(found.get(key))
        if text:
            rows.append((label, text))
    print_table((path, ""), rows + _metadata_rows(found.get("metadata", {})))
    click.echo()
    header = ("tensors of type", "tensors", "numbers", "bytes")
    print_table(header, _type_rows(found.get("tensors", ())))
    unmapped = found.get("unmapped", ())
    if unmapped:
        click.echo()
        click.echo("not mapped:")
        for sentence in unmapped:
            click.echo(f"  {_printable(sentence)}")


def _printable(text: str) -> str:
    """Return a text from an untrusted file without control characters, which a terminal obeys."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )


def _text(value: Any) -> str:
    """Return a value on one line; empty if there is none."""
    if value is None:
        return ""
    if isinstance(value, bool | str):
        return _printable(str(value))
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return _printable(", ".join(_pairs(value)))
    return ", ".join(map(_text, value))


def _pairs(value: Mapping[str, Any]) -> list[str]:
    """Return the texts and integers in a mapping with their keys; a name needs no key."""
    pairs = []
    for key, item in value.items():
        if key == "name" and isinstance(item, str):
            pairs.append(item)
        elif isinstance(item, str) or type(item) is int:
            pairs.append(f"{key} {item}")
    return pairs


def _metadata_rows(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    left_out = 0
    for key, value in metadata.items():
        text = _text(value) if isinstance(value, str | int | float) else ""
        if text and len(text) <= _LONGEST:
            rows.append((_printable(key), text))
        else:
            left_out += 1
    if left_out:
        rows.append(("further metadata", f"{left_out}: see --json"))
    return rows


def _type_rows(tensors: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return number, elements and bytes of the tensors of each type, the largest type first."""
    sums: dict[str, tuple[int, int, int]] = {}
    for tensor in tensors:
        kind = str(tensor["type"])
        count, elements, nbytes = sums.get(kind, (0, 0, 0))
        elements += math.prod(tensor["shape"])
        sums[kind] = (count + 1, elements, nbytes + tensor["bytes"])
    rows = sorted(sums.items(), key=lambda item: -item[1][2])
    return [
        (_printable(kind), f"{count:,}", f"{elements:,}", f"{nbytes:,}")
        for kind, (count, elements, nbytes) in rows
    ]
