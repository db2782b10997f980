"""``arb report``: write a page about runs."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page (.html); default: report.html in the first run.",
)
def report(runs: tuple[Path, ...], out: Path | None) -> None:
    """Write one page of HTML about one run, or to compare several.

    It shows curves, flips per layer, what the model stores, results of tasks, samples, the config,
    machine and versions, and how to repeat the run. The page needs no network and no other file.
    Samples are the texts, pictures and sounds in RUN/samples.
    """
    from arb_ternary_train.report_page.page import write_page

    destination = runs[0] / "report.html" if out is None else out
    write_page(runs, destination)
    click.echo(destination)
