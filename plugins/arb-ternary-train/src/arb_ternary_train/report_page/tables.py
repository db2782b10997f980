"""A table of a report, and its forms: JSON, CSV, LaTeX and text."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from attrs import frozen

#: "long" is a text of several words, "bar" a share that a page draws.
Kind = Literal["text", "long", "number", "count", "bytes", "seconds", "share", "bar"]

_LATEX: Final = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\textquotedbl{}",
    }
)
#: Units by kind, the largest first, and what a value is divided by.
_UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "bytes": {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1},
    "seconds": {"s": 1, "ms": 1e-3, "us": 1e-6},
}


@frozen
class Column:
    """A column.

    Attributes:
        key: its key in the rows.
        title: its heading.
        kind: of its values.
    """

    key: str
    title: str
    kind: Kind = "number"

    @property
    def is_text(self) -> bool:
        """Whether it is aligned to the left."""
        return self.kind in ("text", "long")


@frozen
class Table:
    """Rows of plain values by key; a value that is None or absent is not known.

    Attributes:
        name: of its files.
        title: heading.
        note: a sentence below the heading.
        columns: from left to right.
        rows: from top to bottom.
    """

    name: str
    title: str
    note: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]

    def to_json(self) -> list[dict[str, Any]]:
        """Return the rows with the table's columns, values in full."""
        return [{column.key: row.get(column.key) for column in self.columns} for row in self.rows]

    def to_csv(self) -> str:
        """Return CSV with the keys in the first line.

        Values are as in JSON (``true``, ``1.5``), but texts have no quotes and None is empty.
        """
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([column.key for column in self.columns])
        for row in self.to_json():
            writer.writerow([_plain_text(value) for value in row.values()])
        return file.getvalue()

    def to_latex(self) -> str:
        """Return a ``tabular`` for the package booktabs, with the values of :meth:`cells`."""
        layout = "".join("l" if column.is_text else "r" for column in self.columns)
        head = [column.title for column in self.columns]
        first, *lines = (" & ".join(map(escape_latex, row)) for row in (head, *self.cells()))
        body = "".join(f"{line} \\\\\n" for line in lines)
        return (
            f"% {self.title}; needs \\usepackage{{booktabs}}\n"
            f"\\begin{{tabular}}{{{layout}}}\n\\toprule\n{first} \\\\\n\\midrule\n"
            f"{body}\\bottomrule\n\\end{{tabular}}\n"
        )

    def cells(self) -> list[list[str]]:
        """Return the rows for people."""
        return [
            [shown(row.get(column.key), column.kind) for column in self.columns]
            for row in self.rows
        ]


def shown(value: Any, kind: Kind) -> str:
    """Format ``value`` with four figures and the unit of its kind; a dash if it is not known."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    if kind in _UNITS:
        return _with_unit(value, _UNITS[kind])
    if kind in ("share", "bar"):
        return f"{100 * value:.1f} %"
    if kind == "count":
        return f"{value:,.0f}"
    return _figures(value)


def escape_latex(text: str) -> str:
    """Escape the characters of ``text`` that have a meaning in LaTeX."""
    return text.translate(_LATEX)


def _figures(value: float) -> str:
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.4g}"


def _with_unit(value: float, units: Mapping[str, float]) -> str:
    fitting = [unit for unit, size in units.items() if abs(value) >= size]
    unit = fitting[0] if fitting else list(units)[-1]
    return f"{_figures(value / units[unit])} {unit}"


def _plain_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
