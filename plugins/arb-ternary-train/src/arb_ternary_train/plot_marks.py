"""Vertical marks in a figure of losses: where something was decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import frozen

# : Kinds of marks that have a look of their own: colour where there is one run, and style of the
# line.
_LOOKS: Final = {
    "switch": ("#333333", (0, (5, 2))),
    "rollback": ("#B2182B", "solid"),
    "branch": ("#888888", (0, (1, 2))),
}
#: What is drawn of any other kind.
_OTHER: Final = ("#888888", "dashdot")
# : Texts closer together than this share of the steps would lie on each other: the later one is
# left out.
_CLOSEST: Final = 0.02
#: Longest text of a mark.
_LONGEST: Final = 28


@frozen
class Mark:
    """A step at which something was decided: in a word or two, and of which kind (``switch``,
    ``rollback``, ...).
    """

    step: int
    text: str
    kind: str


def marks_in(records: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """The records of a metrics file, of whatever event, that have a text ``mark``; their kind is
    ``mark_kind``.
    """
    return [
        Mark(
            record["step"],
            record["mark"],
            str(record.get("mark_kind", record.get("event", "mark"))),
        )
        for record in records
        if isinstance(record.get("mark"), str) and isinstance(record.get("step"), int)
    ]


def draw_marks(axes: Any, runs: Sequence[tuple[str, Sequence[Mark]]], span: int) -> None:
    """A thin vertical line for each mark, its text along it at the top, and one entry in the legend
    for each kind.

    Args:
        axes: of matplotlib.
        runs: a colour and the marks of each run. Of several runs, the lines have these colours.
        span: steps that the figure shows.
    """
    kinds: dict[str, None] = {}
    labelled: list[int] = []
    for colour, marks in runs:
        for mark in sorted(marks, key=lambda each: each.step):
            kinds.setdefault(mark.kind)
            own, style = _LOOKS.get(mark.kind, _OTHER)
            shown = own if len(runs) == 1 else colour
            axes.axvline(mark.step, color=shown, linestyle=style, linewidth=0.8, zorder=1.5)
            if any(abs(mark.step - other) < _CLOSEST * span for other in labelled):
                continue
            labelled.append(mark.step)
            text = mark.text if len(mark.text) <= _LONGEST else f"{mark.text[: _LONGEST - 1]}…"
            axes.annotate(
                text,
                (mark.step, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(-2, -2),
                textcoords="offset points",
                rotation=90,
                ha="right",
                va="top",
                fontsize=7,
                color=shown,
            )
    for kind in kinds:
        own, style = _LOOKS.get(kind, _OTHER)
        axes.plot(
            [],
            [],
            color=own if len(runs) == 1 else "0.35",
            linestyle=style,
            linewidth=0.8,
            label=kind,
        )
