"""Values of options that are lists, separated by commas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import click

T = TypeVar("T")


def parse_list(text: str) -> list[str]:
    """What commas separate, each once.

    Raises:
        click.BadParameter: it names nothing.
    """
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise click.BadParameter("it names nothing")
    return parts


def parse_counts(text: str, what: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, each once.

    Raises:
        click.BadParameter: a part is no such number; ``what`` says what it should be.
    """
    parts = parse_list(text)
    for part in parts:
        if not (part.isascii() and part.isdecimal() and int(part)):
            raise click.BadParameter(f"{part!r} is not {what}")
    return tuple(int(part) for part in parts)


def named_ones(text: str, known: Mapping[str, T]) -> tuple[T, ...]:
    """Those of ``known`` that the text names, each once.

    Raises:
        click.BadParameter: it names another.
    """
    parts = parse_list(text)
    for part in parts:
        if part not in known:
            raise click.BadParameter(f"{part!r} is not one of {', '.join(known)}")
    return tuple(known[part] for part in parts)
