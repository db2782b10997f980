"""``arb import``: make a run of a model that another program has written."""

from __future__ import annotations

from pathlib import Path

import click

from arb_ternary.cli.options import completes, plugin_files
from arb_ternary.cli.output import print_notes
from arb_ternary_train.openmp import wait_passively


@click.command("import")
@click.argument("source", type=click.Path())
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "name",
    metavar="NAME",
    shell_complete=completes("importer"),
    help="Importer; default: the one that recognises the source.",
)
@click.option(
    "--scales",
    metavar="fold|round|float",
    help="How scales that are not powers of two are kept; the same as -o scales=NAME.",
)
@click.option(
    "-o", "--option", "options", metavar="NAME=VALUE", multiple=True, help="Option of the importer."
)
@plugin_files
def import_command(
    source: str, run: Path, name: str | None, scales: str | None, options: tuple[str, ...]
) -> None:
    """Make the run directory RUN of the model in SOURCE: a file, a folder, or an address such as
    hf://org/name.

    The run can be evaluated, generated from and exported, and another run can start from it.
    """
    wait_passively()
    from arb_ternary_interchange.importing import find_source, import_model

    given = list(options)
    if scales is not None:
        given.append(f"scales={scales}")
    found = find_source(source, name, given)
    print_notes(import_model(found, run))
    click.echo(f"{run}: {found.name}, {source}")
    click.echo(
        f"train it further with: arb train {run}/config.yaml --init-from {run} --run-dir "
        f"{run}-tuned",
        err=True,
    )
