"""The commands ``arb plugins check`` and ``arb plugins new``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from arb_ternary_testing.scaffold.generate import KINDS, new_plugin


@click.command("check")
@click.argument("name", metavar="NAME|FILE.py")
@click.option("--kind", metavar="KIND", help="Check only the plugin's components of this kind.")
def check(name: str, kind: str | None) -> int:
    """Run the conformance kit on an installed plugin, or on a plugin that is a single file.

    The exit code is 0 if it passes.
    """
    from arb_ternary_testing.runner import check_plugin

    return check_plugin(name, kind)


@click.command("new")
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice(list(KINDS)),
    required=True,
    help="What the plugin provides; an optimizer is for float parameters, a vote-rule for ternary "
    "weights.",
)
@click.option(
    "--into",
    "destination",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Folder in which to create the plugin's folder. Default: the current one.",
)
def new(name: str, kind: str, destination: Path) -> None:
    """Write a new plugin: a distribution with one working component, and its tests."""
    folder = new_plugin(name, kind, destination)
    click.echo(folder)
    click.echo(f"{KINDS[kind]}, with its tests. Next:")
    click.echo(f"  cd {shlex.quote(str(folder))}")
    click.echo("  pip install -e '.[test]'")
    click.echo("  python -m pytest")
