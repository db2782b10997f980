"""The ``arb`` command: its options, and the exit code of whatever happens."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import click

from arb_ternary import API_VERSION, __version__
from arb_ternary.cli.groups import RegistryGroup
from arb_ternary.cli.options import plugin_files
from arb_ternary.errors import ArbError, Interrupted, render

_INTERFACE = ".".join(map(str, API_VERSION))


class _StandardError(logging.Handler):
    """Writes to whatever standard error is at that moment, so that a progress bar or a test can
    redirect it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)


@click.group(cls=RegistryGroup, context_settings={"help_option_names": ["-h", "--help"]})
@plugin_files
@click.version_option(
    __version__, prog_name="arb", message=f"%(prog)s %(version)s (plugins {_INTERFACE})"
)
def arb() -> None:
    """Train, convert and ship pure-ternary neural networks."""
    # Only the command line shows the program's log, such as the choice of a backend: a library
    # leaves logging alone.
    logger = logging.getLogger("arb_ternary")
    if not any(isinstance(handler, _StandardError) for handler in logger.handlers):
        logger.addHandler(_StandardError())
        logger.setLevel(logging.INFO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``arb`` and return its exit code: 0 ok, 1 failure, 2 usage or config, 3 environment, 130
    interrupted.

    ``arguments`` are the command line without the program's name; None takes it from ``sys.argv``.
    """
    try:
        result: Any = arb.main(arguments, prog_name="arb", standalone_mode=False)
    except ArbError as error:
        click.echo(render(error), err=True)
        return error.exit_code
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort as stop:
        # click makes one of an interrupt, of an end of input in a prompt, and of a "no" to a
        # question
        if isinstance(stop.__cause__ or stop.__context__, KeyboardInterrupt):
            return _interrupted()
        click.echo("aborted", err=True)
        return 1
    except KeyboardInterrupt:
        return _interrupted()
    return result if isinstance(result, int) and not isinstance(result, bool) else 0


def _interrupted() -> int:
    click.echo("interrupted", err=True)
    return Interrupted.exit_code


if __name__ == "__main__":
    sys.exit(main())
