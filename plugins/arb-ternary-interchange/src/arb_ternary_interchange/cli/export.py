"""``arb export``: write a model in another form."""

from __future__ import annotations

from pathlib import Path

import click

from arb_ternary.cli.options import completes, plugin_files
from arb_ternary.cli.output import print_notes


@click.command()
@click.argument("source", type=click.Path())
@click.argument("destination", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "target",
    default="safetensors",
    show_default=True,
    metavar="NAME",
    shell_complete=completes("exporter"),
    help="Exporter.",
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
    source: str,
    destination: Path,
    target: str,
    number_type: str | None,
    layout: str | None,
    options: tuple[str, ...],
) -> None:
    """Write the model of SOURCE to DESTINATION.

    SOURCE is a run, a checkpoint, a GGUF file, a Hugging Face folder, a safetensors file, or
    hf://org/name.
    """
    from arb_ternary_interchange.export import export_model

    given = list(options)
    if number_type is not None:
        given.append(f"type={number_type}")
    if layout is not None:
        given.append(f"layout={layout}")
    exported = export_model(source, destination, target, given)
    print_notes(exported.notes)
    click.echo(f"{destination}: {exported.summary}")
