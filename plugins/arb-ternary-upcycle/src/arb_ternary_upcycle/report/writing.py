"""Writes ``RUN/report``: JSON, CSV, LaTeX, figures and one page, all from the same tables."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from attrs import evolve

from arb_ternary.errors import ArbError
from arb_ternary_train.durable import replacing
from arb_ternary_train.report_page.contents import tasks_table
from arb_ternary_train.report_page.drawing import to_png
from arb_ternary_train.report_page.page import write_page
from arb_ternary_train.report_page.runs import read_runs
from arb_ternary_upcycle.report.contents import MEASUREMENTS, gather
from arb_ternary_upcycle.report.figures import draw_figures
from arb_ternary_upcycle.store import PLAN_FILE, save_json

#: Folder of the report in a run.
FOLDER: Final = "report"


def write_report(run: Path) -> Path:
    """Write the report of a run directory from its files, and return the path of the page.

    The files are ``report.json``, ``NAME.csv`` and ``NAME.tex`` for each table, ``NAME.png`` for
    each figure, and ``report.html``, the page of ``arb report``. Each is replaced as a whole.

    Raises:
        ArbError: something in the run is damaged, or the report cannot be written.
    """
    contents = gather(run)
    tasks = tasks_table(read_runs([run]))
    if tasks.rows:
        contents = evolve(contents, tables=[*contents.tables, tasks])
    files = {f"{name}.png": to_png(each) for name, each in draw_figures(contents).items()}
    for table in contents.tables:
        files[f"{table.name}.csv"] = table.to_csv().encode()
        files[f"{table.name}.tex"] = table.to_latex().encode()
    folder = run / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            with replacing(folder / name) as new:
                new.write_bytes(content)
    except OSError as error:
        raise ArbError(
            f"{folder}: the report cannot be written: {error}", "Free some space, then --resume."
        ) from error
    page = folder / "report.html"
    write_page([run], page)
    save_json(folder / "report.json", contents.to_json())
    return page


def refresh_report(run: Path) -> None:
    """Write the report again if the run has one, because one of its files has changed."""
    if (run / MEASUREMENTS / PLAN_FILE).exists():
        write_report(run)
