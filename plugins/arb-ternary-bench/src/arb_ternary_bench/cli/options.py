"""Options that the commands of the bench share, and values that are lists separated by commas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from arb_ternary_bench.table import ResultTable

Callback = Callable[[click.Context, click.Parameter, Any], Any]

#: Choices of the number of weights that share an exponent.
GROUPS = ("32", "64", "128", "256", "row")

out = click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for result.json and the table.",
)
threads = click.option(
    "--threads", type=click.IntRange(min=1), help="Threads of every contender; default: torch's."
)


def seconds(default: float, help: str) -> Callable[[Any], Any]:  # noqa: A002  # click's own name
    """Make the option ``--seconds``."""
    return click.option(
        "--seconds",
        default=default,
        show_default=True,
        type=click.FloatRange(min=0, min_open=True),
        help=help,
    )


def finish(
    result: Mapping[str, Any], table: ResultTable, out: Path | None, *, as_json: bool
) -> None:
    """Write the result to a folder, if there is one, and print it."""
    if out is not None:
        table.write(result, out)
    table.show(result, as_json=as_json)


def say(line: str) -> None:
    """Print progress, which is not part of the result."""
    click.echo(line, err=True)


def parse_list(text: str) -> list[str]:
    """Split a text at commas; each part counts once.

    Raises:
        click.BadParameter: it names nothing.
    """
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise click.BadParameter("it names nothing")
    return parts


def names(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, ...]:
    """Take any names."""
    return tuple(parse_list(text))


def counts(what: str) -> Callback:
    """Make a callback that takes whole numbers from 1 on; ``what`` says what each should be."""

    def callback(
        _context: click.Context, _parameter: click.Parameter, text: str
    ) -> tuple[int, ...]:
        parts = parse_list(text)
        for part in parts:
            if not (part.isascii() and part.isdecimal() and int(part)):
                raise click.BadParameter(f"{part!r} is not {what}")
        return tuple(map(int, parts))

    return callback


def members(known: Callable[[], Mapping[str, Any]]) -> Callback:
    """Make a callback that takes names of a mapping, which is loaded when it is needed."""

    def callback(
        _context: click.Context, _parameter: click.Parameter, text: str
    ) -> tuple[Any, ...]:
        there = known()
        parts = parse_list(text)
        for part in parts:
            if part not in there:
                raise click.BadParameter(f"{part!r} is not one of {', '.join(there)}")
        return tuple(there[part] for part in parts)

    return callback


def parse_group(text: str) -> Any:
    """Return a group size, one of :data:`GROUPS`, as the config has it."""
    return "row" if text == "row" else int(text)


def parse_shape(text: str) -> tuple[int, int]:
    """Return the sizes of ``NxK``, outputs by inputs.

    Raises:
        click.BadParameter: it is something else.
    """
    sizes = text.lower().split("x")
    if len(sizes) == 2 and all(size.isascii() and size.isdecimal() for size in sizes):
        outputs, inputs = map(int, sizes)
        if outputs and inputs:
            return outputs, inputs
    raise click.BadParameter(f"{text!r} is not NxK, outputs by inputs, such as 4096x4096")


def backend_names(
    context: click.Context, _parameter: click.Parameter, text: str | None
) -> tuple[str, ...]:
    """Take names of backends; without any, all that are usable on ``--device``, preferred first.

    Last resorts, such as an interpreter, take part only if they are named.
    """
    from arb_ternary.backends.select import BackendRequest, select

    device = context.params.get("device", "cpu")
    if text is None:
        return usable_backends(device)
    return tuple(
        select(BackendRequest(name, "--backends", device)).name for name in parse_list(text)
    )


def usable_backends(device: str) -> tuple[str, ...]:
    """Return the names of the backends that a device can use, the preferred one first."""
    from arb_ternary.backends.select import candidates

    return tuple(one.name for one in candidates(device) if one.usable and not one.last_resort)
