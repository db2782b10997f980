"""Print tables, JSON and notes. Tables are drawn with rich on a terminal, else as plain lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click


def print_json(value: Any) -> None:
    """Print a value as one JSON document."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_notes(notes: Iterable[str]) -> None:
    """Print notes for the user, one line each, to standard error."""
    for note in notes:
        click.echo(f"note: {note}", err=True)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table. None is an empty cell. Outside a terminal no text is wrapped or cut."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for line in aligned([columns, *cells]):
            click.echo(line)
        return

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    for row in cells:
        table.add_row(*map(Text, row))
    Console().print(table)
