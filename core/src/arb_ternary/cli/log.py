"""What the program logs, such as the choice of a backend, as plain lines on standard error."""

from __future__ import annotations

import logging

import click

__all__ = ["log_to_standard_error"]


class _StandardError(logging.Handler):
    """Writes to whatever standard error is at that moment, so that a progress bar or a test can redirect it."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)


def log_to_standard_error() -> None:
    """Show the program's own log from INFO on. Only the command line calls this: a library leaves logging alone."""
    logger = logging.getLogger("arb_ternary")
    if not any(isinstance(handler, _StandardError) for handler in logger.handlers):
        logger.addHandler(_StandardError())
        logger.setLevel(logging.INFO)
