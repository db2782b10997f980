"""``arb plot``: draw the curves of runs."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The figure (.png, .svg, .pdf); default: RUN/METRIC.png.",
)
@click.option(
    "--metric",
    default="loss",
    show_default=True,
    help="What to draw: a number of steps or evaluations.",
)
def plot(runs: tuple[Path, ...], output: Path | None, metric: str) -> None:
    """Draw training and validation loss of one or several runs, and baselines.

    Vertical lines mark the steps at which something was decided, such as a switch of strategy.
    """
    from arb_ternary_train.directory import RunDirectory
    from arb_ternary_train.plot import plot_runs

    directories = [RunDirectory.existing(run) for run in runs]
    destination = runs[0] / f"{metric}.png" if output is None else output
    plot_runs(directories, destination, metric)
    click.echo(destination)
