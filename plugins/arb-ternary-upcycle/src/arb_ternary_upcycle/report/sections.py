"""The sections of a report about teacher and student."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from attrs import evolve

from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.report_page.sections import Card, Contribution, Figure, Section
from arb_ternary_train.report_page.tables import shown
from arb_ternary_upcycle.report.contents import Contents, gather
from arb_ternary_upcycle.report.figures import draw_figures

#: Numbers at the top of the page that compare the models: table, column, and whether the teacher's
#: over the student's is shown, or the student's over the teacher's.
_COMPARED: Final[Mapping[str, tuple[str, str, bool]]] = {
    "Perplexity, times the teacher's": ("perplexity", "perplexity", False),
    "Weights smaller by": ("memory", "weight_bytes", True),
    "Keys and values smaller by": ("kv_cache", "bytes_per_token", True),
    "Decoding speed, times the teacher's": ("latency", "decode_tokens_per_second", False),
}


def contribute(run: RunDirectory) -> Contribution | None:
    """Return what upcycling adds to the report of a run; None if nothing of a run is upcycled.

    Raises:
        ArbError: a file is damaged.
    """
    contents = gather(run.path)
    if not contents.tables:
        return None
    drawings = draw_figures(contents)
    sections = []
    for table in contents.tables:
        drawing = drawings.get(table.name)
        figures = [] if drawing is None else [Figure(table.name, table.title, drawing)]
        bare = evolve(table, note="")
        sections.append(Section(table.title, table.note, figures, [bare]))
    # The run's own curve is on every page.
    earlier = list(enumerate(contents.curves))[1:]
    figures = [
        Figure(f"training-{number}", curves.name, drawings[f"training-{number}"])
        for number, curves in earlier
    ]
    names = ", ".join(curves.name for _, curves in earlier)
    note = f"Losses over optimizer steps of the runs that this one started from: {names}."
    if figures:
        sections.append(Section("Training before this run", note, figures))
    return Contribution(list(_cards(contents)), contents.facts, sections)


def _cards(contents: Contents) -> Iterator[Card]:
    """Yield the numbers that people look for first."""
    checks = contents.table("checks")
    if checks is not None:
        failed = [row["label"] for row in checks.rows if not row["passed"]]
        count = len(checks.rows)
        line = f"not: {', '.join(dict.fromkeys(failed))}" if failed else "all checks passed"
        yield Card("Limits kept", f"{count - len(failed)} of {count}", line)
    for title, (name, key, teacher_over_student) in _COMPARED.items():
        table = contents.table(name)
        if table is None:
            continue
        teacher = table.rows[0][key]
        student = table.rows[1][key]
        ratio = teacher / student if teacher_over_student else student / teacher
        kind = next(column.kind for column in table.columns if column.key == key)
        line = f"{shown(student, kind)}, the teacher {shown(teacher, kind)}"
        yield Card(title, f"x {ratio:.3g}", line)
