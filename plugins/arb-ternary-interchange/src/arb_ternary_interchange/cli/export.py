"""``arb export``: write a run's model in another form."""

from __future__ import annotations

from pathlib import Path

import click

from arb_ternary.cli.options import plugin_files


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option(
    "--format", "target", default="safetensors", show_default=True, metavar="NAME", help="Exporter."
)
@click.option(
    "--type",
    "number_type",
    metavar="NAME",
    help="How numbers are stored; the same as -o type=NAME.",
)
@click.option(
    "--layout", metavar="NAME", help="How weights are arranged; the same as -o layout=NAME."
)
@click.option(
    "-o", "--option", "options", metavar="NAME=VALUE", multiple=True, help="Option of the exporter."
)
@plugin_files
def export(
    run: Path,
    destination: Path,
    target: str,
    number_type: str | None,
    layout: str | None,
    options: tuple[str, ...],
) -> None:
    """Write the model of RUN (a run directory or a checkpoint) to DESTINATION."""
    from arb_ternary_interchange.export import export_run

    given = list(options)
    if number_type is not None:
        given.append(f"type={number_type}")
    if layout is not None:
        given.append(f"layout={layout}")
    written = export_run(run, destination, target, given)
    click.echo(f"{destination}: {written}")
