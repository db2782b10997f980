"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from arb_ternary.plugins.manager import manager

__all__ = ["as_json", "overrides", "plugin_files"]

F = TypeVar("F", bound=Callable[..., Any])


def _load_files(_context: click.Context, _parameter: click.Parameter, files: tuple[str, ...]) -> tuple[str, ...]:
    for file in files:
        manager().load_file(file)
    return files


def plugin_files(command: F) -> F:
    """``--plugin FILE``, any number of times: plugin files, loaded before anything else; nothing reaches the command.

    Eager, so that what the files register exists when the command's other arguments are read.
    """
    return click.option(
        "--plugin",
        "plugin_files",
        metavar="FILE",
        multiple=True,
        is_eager=True,
        expose_value=False,
        callback=_load_files,
        help="Load a plugin from a Python file. Can be repeated.",
    )(command)


def as_json(command: F) -> F:
    """``--json``: the command gets ``as_json: bool`` and prints one JSON document instead of text."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def overrides(command: F) -> F:
    """``-o path=value``, any number of times: the command gets ``overrides: tuple[str, ...]`` for loading a config."""
    return click.option(
        "-o",
        "--override",
        "overrides",
        metavar="PATH=VALUE",
        multiple=True,
        help="Change a setting, e.g. -o phases.0.steps=10. Can be repeated.",
    )(command)
