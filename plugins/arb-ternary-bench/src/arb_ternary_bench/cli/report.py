"""What a bench leaves behind: files in a folder, and JSON or a table on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import click

from arb_ternary.cli.output import print_json, print_table


class ResultTable(Protocol):
    """A module that makes a table of a bench's result."""

    @property
    def COLUMNS(self) -> Sequence[str]: ...  # noqa: N802  # a constant of the module

    def rows(self, result: Mapping[str, Any], /) -> Iterable[tuple[str, ...]]:
        """The table's rows."""
        ...

    def notes(self, result: Mapping[str, Any], /) -> Iterable[str]:
        """What a reader of the table has to know."""
        ...

    def markdown(self, result: Mapping[str, Any], /) -> str:
        """The table with its notes."""
        ...


def write_result(result: Mapping[str, Any], table: ResultTable, out: Path | None) -> None:
    """Write ``result.json`` and ``table.md`` to a folder that is there; nothing without one."""
    if out is not None:
        from arb_ternary_train.directory import write_json

        write_json(out / "result.json", result)
        (out / "table.md").write_text(table.markdown(result), encoding="utf-8")


def report(result: Mapping[str, Any], table: ResultTable, *, as_json: bool) -> None:
    """Print the result, or its table with the notes."""
    if as_json:
        print_json(result)
        return
    print_table(table.COLUMNS, table.rows(result))
    for line in table.notes(result):
        click.echo(line)
