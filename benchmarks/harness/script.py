"""What the command lines of the scripts share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from arb_ternary.backends.select import candidates
from arb_ternary.errors import ArbError, render
from harness.table import ResultTable

out = click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for result.json and the table.",
)
threads = click.option("--threads", type=click.IntRange(min=1), help="Threads; default: torch's.")


def seconds(default: float, what: str) -> Callable[[Any], Any]:
    """Make the option ``--seconds``; ``what`` says of what."""
    kind = click.FloatRange(min=0, min_open=True)
    return click.option("--seconds", default=default, show_default=True, type=kind, help=what)


def comma_list(
    name: str, default: str, convert: Callable[[str], Any], what: str
) -> Callable[[Any], Any]:
    """Make an option that takes a list with commas.

    Args:
        name: of the option.
        default: the text that stands for a missing option.
        convert: makes the value of each part; a ValueError or KeyError refuses it.
        what: the help.
    """

    def parse(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[Any, ...]:
        values = []
        for part in filter(None, (part.strip() for part in text.split(","))):
            try:
                values.append(convert(part))
            except (ValueError, KeyError) as error:
                raise click.BadParameter(f"{part!r} is none of it") from error
        return tuple(dict.fromkeys(values))

    return click.option(
        name, default=default, show_default=True, metavar="VALUE,...", callback=parse, help=what
    )


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def usable_backends(device: str) -> tuple[str, ...]:
    """Return the names of the backends that a device can use, the preferred one first."""
    return tuple(one.name for one in candidates(device) if one.usable and not one.last_resort)


def say(line: str) -> None:
    """Print progress, which is not part of the result."""
    click.echo(line, err=True)


def finish(
    result: Mapping[str, Any], table: ResultTable, folder: Path | None, *, as_json: bool
) -> None:
    """Write the result to a folder, if there is one, and print it."""
    if folder is not None:
        table.write(result, folder)
    table.show(result, as_json=as_json)


def main(command: click.Command) -> None:
    """Run a script; an error of ours is printed and decides the exit code."""
    try:
        command()
    except ArbError as problem:
        click.echo(render(problem), err=True)
        sys.exit(problem.exit_code)
