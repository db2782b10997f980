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

    common = {"type": number_type, "layout": layout}
    given = [f"{name}={value}" for name, value in common.items() if value is not None]
    written = export_run(run, destination, target, [*options, *given])
    click.echo(f"{destination}: {written}")
