"""Tables of results: on the terminal, in Markdown and as files next to ``result.json``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from attrs import frozen

from arb_ternary.cli.output import print_json, print_table

Record = Mapping[str, Any]


@frozen
class Column:
    """A column of a table.

    Attributes:
        title: its heading.
        text: what it shows of a record.
        left: whether it is aligned to the left, as words are.
    """

    title: str
    text: Callable[[Record], str]
    left: bool = False


def no_notes(_result: Record) -> list[str]:
    """Return no note: the table explains itself."""
    return []


@frozen
class ResultTable:
    """How the result of a bench or of a study is shown.

    Attributes:
        columns: from left to right.
        records: the records of a result, one per row.
        notes: what a reader of the table has to know, one sentence or paragraph each.
    """

    columns: Sequence[Column]
    records: Callable[[Record], Iterable[Record]]
    notes: Callable[[Record], list[str]] = no_notes

    @property
    def titles(self) -> tuple[str, ...]:
        """The headings of the columns."""
        return tuple(column.title for column in self.columns)

    def rows(self, result: Record) -> list[tuple[str, ...]]:
        """Return the cells of the table."""
        return [
            tuple(column.text(record) for column in self.columns) for record in self.records(result)
        ]

    def lines(self, result: Record) -> list[str]:
        """Return the lines of the table in Markdown, without the notes."""
        rule = tuple("---" if column.left else "---:" for column in self.columns)
        return [f"| {' | '.join(cells)} |" for cells in (self.titles, rule, *self.rows(result))]

    def markdown(self, result: Record) -> str:
        """Return the table in Markdown, with the notes below it."""
        return "\n".join([*self.lines(result), "", *self.notes(result), ""])

    def write(self, result: Record, folder: Path) -> None:
        """Write ``result.json`` and ``table.md`` to a folder, which is made if it is missing."""
        from arb_ternary_train.directory import write_json

        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "result.json", result)
        (folder / "table.md").write_text(self.markdown(result), encoding="utf-8")

    def show(self, result: Record, *, as_json: bool) -> None:
        """Print the result as JSON, or the table with its notes."""
        if as_json:
            print_json(result)
            return
        print_table(self.titles, self.rows(result))
        for note in self.notes(result):
            click.echo(note)


def number(value: float | None, digits: int = 0, scale: float = 1.0) -> str:
    """Format ``value * scale`` with ``digits`` digits after the point; None gives an empty cell."""
    return "" if value is None else f"{value * scale:,.{digits}f}"


def mean_and_deviation(values: Sequence[float], digits: int) -> str:
    """Format the mean of values and, if there are several, their standard deviation."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def ratio(value: float | None) -> str:
    """Format a ratio; None gives an empty cell."""
    return number(value, 2)


def percent(value: float | None) -> str:
    """Format a share; None gives an empty cell."""
    return "" if value is None else f"{value:.0%}"


def mebibytes(value: float | None) -> str:
    """Format a number of bytes in MiB; None gives an empty cell."""
    return number(value, 0, 1 / 2**20)
