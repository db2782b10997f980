"""Tables and JSON on standard output: rich on a terminal, aligned plain lines elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click


def print_json(value: Any) -> None:
    """Print one JSON document, with keys in the order they have."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; a cell is anything with a text, None an empty cell. Nothing wraps or is cut
    outside a terminal.
    """
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        for row in [columns, *cells]:
            click.echo(
                "  ".join(
                    cell.ljust(width) for cell, width in zip(row, widths, strict=True)
                ).rstrip()
            )
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    for row in cells:
        table.add_row(*map(Text, row))
    Console().print(table)
