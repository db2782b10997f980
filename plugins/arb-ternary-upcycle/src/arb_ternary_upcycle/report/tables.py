"""A table, once: as JSON, CSV, LaTeX and text for people."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from attrs import frozen

Kind = Literal["text", "number", "count", "bytes", "seconds", "share"]

_LATEX: Final = {
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
_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


@frozen
class Column:
    """A column: its key in the rows, what people read above it, and what kind of values it has."""

    key: str
    title: str
    kind: Kind = "number"

    @property
    def is_text(self) -> bool:
        """Whether it is set to the left."""
        return self.kind == "text"


@frozen
class Table:
    """Rows of plain values by key; a row may lack some, or have None: then nothing is known.

    Attributes:
        name: of its files.
        title: for people.
        columns: in their order.
        rows: in theirs.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]

    def to_json(self) -> list[dict[str, Any]]:
        """The rows with the table's columns, whole values."""
        return [{column.key: row.get(column.key) for column in self.columns} for row in self.rows]

    def to_csv(self) -> str:
        """Keys in the first line; values as JSON has them (``true``, ``1.5``), text without quotes,
        empty for None.
        """
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([column.key for column in self.columns])
        for row in self.to_json():
            writer.writerow([_plain_text(value) for value in row.values()])
        return file.getvalue()

    def to_latex(self) -> str:
        """A ``tabular`` with the rules of the package booktabs, values as people read them."""
        layout = "".join("l" if column.is_text else "r" for column in self.columns)
        head = " & ".join(escape_latex(column.title) for column in self.columns)
        lines = [" & ".join(escape_latex(text) for text in cells) for cells in self.cells()]
        body = "".join(f"{line} \\\\\n" for line in lines)
        return (
            f"% {self.title}; needs "
            f"\\usepackage{{booktabs}}\n\\begin{{tabular}}{{{layout}}}\n\\toprule\n{head} \\\\\n"
            f"\\midrule\n{body}\\bottomrule\n\\end{{tabular}}\n"
        )

    def cells(self) -> list[list[str]]:
        """The rows as people read them."""
        return [
            [shown(row.get(column.key), column.kind) for column in self.columns]
            for row in self.rows
        ]


def shown(value: Any, kind: Kind) -> str:
    """``value`` as people read it: four figures, with the unit of its kind; a dash where nothing is
    known.
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    if kind == "bytes":
        return _bytes(value)
    if kind == "seconds":
        return _seconds(value)
    if kind == "share":
        return f"{100 * value:.1f} %"
    if kind == "count" or (isinstance(value, int) and kind != "number"):
        return f"{value:,.0f}"
    return _figures(value)


def escape_latex(text: str) -> str:
    """``text`` for LaTeX, every character of a meaning there written out."""
    return "".join(_LATEX.get(character, character) for character in text)


def _figures(value: float) -> str:
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3g}"
    text = f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"
    short = text.rstrip("0").rstrip(".") if "." in text else text
    return short if float(short.replace(",", "")) == value else text  # 0.05 is exact, and so is 2


def _bytes(value: float) -> str:
    unit = 0
    while abs(value) >= 1024 and unit < len(_BYTE_UNITS) - 1:
        value = value / 1024
        unit = unit + 1
    return (
        f"{value:,.0f} {_BYTE_UNITS[unit]}"
        if unit == 0
        else f"{_figures(value)} {_BYTE_UNITS[unit]}"
    )


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            return f"{_figures(value / size)} {unit}"
    return f"{_figures(value * 1e6)} us"


def _plain_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)
