"""Options that several commands share."""

from __future__ import annotations

import click

from arb_ternary.plugins.manager import manager


def _load_files(_context: click.Context, _parameter: click.Parameter, files: tuple[str, ...]) -> None:
    for file in files:
        manager().load_file(file)


#: ``--plugin FILE``, any number of times; nothing reaches the command. Eager, so that what the files register exists
#: when the command's other arguments are read.
plugin_files = click.option(
    "--plugin",
    metavar="FILE",
    multiple=True,
    is_eager=True,
    expose_value=False,
    callback=_load_files,
    help="Load a plugin from a Python file. Can be repeated.",
)

#: ``--json``: the command gets ``as_json: bool`` and prints one JSON document instead of text.
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

#: ``--device NAME``, for questions about a device.
device = click.option("--device", default="cpu", show_default=True, help="Device to ask about, e.g. cpu, cuda:0, mps.")

#: ``-o path=value``, any number of times: the command gets ``overrides: tuple[str, ...]`` for loading a config.
overrides = click.option(
    "-o",
    "--override",
    "overrides",
    metavar="PATH=VALUE",
    multiple=True,
    help="Change a setting, e.g. -o phases.0.steps=10. Can be repeated.",
)
