"""Options that the commands which read a trained run share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from arb_ternary.cli.options import completes, plugin_files

_Command = TypeVar("_Command", bound=Callable[..., Any])

_backend = click.option(
    "--backend",
    metavar="NAME",
    shell_complete=completes("backend"),
    help="Kernel backend; overrides ARB_TERNARY_BACKEND and the run's config.",
)
_device = click.option("--device", help="cpu, cuda, cuda:N or mps; default: the run's own.")


def load_options(command: _Command) -> _Command:
    """Add ``--backend``, ``--device`` and ``--plugin`` to a command.

    The command takes ``backend: str | None`` and ``device: str | None`` and passes them to
    :func:`arb_ternary_train.restore.load_run`.
    """
    return _backend(_device(plugin_files(command)))
