"""``arb push``: publish a model on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

import click

from arb_ternary.cli.options import plugin_files
from arb_ternary.cli.output import print_notes


@click.command()
@click.argument("source", type=click.Path())
@click.argument("repository", metavar="ORG/NAME")
@click.option("--private", is_flag=True, help="Make a new repository private.")
@click.option("--base-model", metavar="ORG/NAME", help="The model that this one was made from.")
@click.option("--license", "licence", metavar="ID", help="Its licence, such as apache-2.0.")
@click.option(
    "--dry-run",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Write the files to this new folder, and upload nothing.",
)
@plugin_files
def push(
    source: str,
    repository: str,
    private: bool,
    base_model: str | None,
    licence: str | None,
    dry_run: Path | None,
) -> None:
    """Publish the model of SOURCE as ORG/NAME on the Hugging Face Hub.

    The repository gets a folder for transformers, a GGUF file for llama.cpp, and a card with bits
    per weight, results of `arb eval --tasks` and commands. SOURCE is as for `arb export`.
    """
    from arb_ternary_interchange.hub import Publication, publish, write_publication

    publication = Publication(repository, base_model, licence, private)
    if dry_run is None:
        address, notes = publish(source, publication)
        print_notes(notes)
        click.echo(address)
        return
    print_notes(write_publication(source, dry_run, publication))
    click.echo(f"{dry_run}: what would be uploaded to {repository}")
