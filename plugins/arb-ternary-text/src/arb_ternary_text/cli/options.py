"""Options that the commands which draw tokens from a model share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])

_temperature = click.option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    default=0.8,
    show_default=True,
    help="0 = always the most likely token.",
)
_top_k = click.option(
    "--top-k",
    type=click.IntRange(min=1),
    help="Draw among this many of the most likely tokens only.",
)
_top_p = click.option(
    "--top-p",
    type=click.FloatRange(0.0, 1.0, min_open=True),
    help="Draw among the most likely tokens that together have this probability.",
)
_seed = click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="The same seed gives the same result; default: a different one each time.",
)

#: Option ``stops: tuple[str, ...]`` of commands that draw text.
stop_option = click.option(
    "--stop",
    "stops",
    multiple=True,
    help="Text at which to stop, beside the end tokens of the model; it is not shown. Repeatable.",
)


def sampling_options(command: _Command) -> _Command:
    """Add ``--temperature``, ``--top-k``, ``--top-p`` and ``--seed`` to a command.

    They are arguments of :func:`arb_ternary_text.models.generate.generate`.
    """
    return _temperature(_top_k(_top_p(_seed(command))))
