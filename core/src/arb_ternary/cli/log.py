"""Show the log of the program on standard error."""

from __future__ import annotations

import logging

import click


class _StandardError(logging.Handler):
    """Writes to the standard error of the moment, so that a progress bar or a test can redirect."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)


def show_log() -> None:
    """Show the log of the program, such as the choice of a backend.

    Only the command line does this: a library leaves logging alone.
    """
    logger = logging.getLogger("arb_ternary")
    if not any(isinstance(handler, _StandardError) for handler in logger.handlers):
        logger.addHandler(_StandardError())
        logger.setLevel(logging.INFO)
