"""Writes ``RUN/report``: JSON, CSV, LaTeX, figures and one page, all of the same tables."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from arb_ternary.errors import ArbError
from arb_ternary_train.directory import write_json
from arb_ternary_train.durable import replacing
from arb_ternary_upcycle.benchmark.measurements import MEASUREMENTS
from arb_ternary_upcycle.report.contents import gather
from arb_ternary_upcycle.report.figures import draw_figures
from arb_ternary_upcycle.report.page import make_page

#: Where a report lies in a run.
FOLDER: Final = "report"


def write_report(run: Path) -> Path:
    """Write the report of the run directory ``run`` from what is in it; returns the page.

    ``report.json``; each table as ``NAME.csv`` and ``NAME.tex``; each figure as ``NAME.png``;
    ``report.html``. Each file is replaced whole.

    Raises:
        ArbError: something in the run is damaged, or the report cannot be written.
    """
    contents = gather(run)
    figures = draw_figures(contents)
    folder = run / FOLDER
    page = folder / "report.html"
    files = {
        **{f"{table.name}.csv": table.to_csv().encode() for table in contents.tables},
        **{f"{table.name}.tex": table.to_latex().encode() for table in contents.tables},
        **{f"{name}.png": image for name, image in figures.items()},
        page.name: make_page(contents, figures).encode(),
    }
    try:
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            with replacing(folder / name) as new:
                new.write_bytes(content)
        write_json(folder / "report.json", contents.to_json())
    except OSError as error:
        raise ArbError(
            f"{folder}: the report cannot be written: {error}", "Free some space, then --resume."
        ) from error
    return page


def refresh_report(run: Path) -> None:
    """Write the report anew where the run has one: something that it tells has changed."""
    if (run / MEASUREMENTS).exists():
        write_report(run)
