"""Prints the report of a finished run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from arb_ternary.cli.output import print_json, print_table

if TYPE_CHECKING:
    from arb_ternary_train.report import RunReport


def show_outcome(report: RunReport, *, as_json: bool) -> None:
    """Print the report of a run.

    Raises:
        ArbError: a check failed.
    """
    if as_json:
        print_json({"directory": report.directory, **report.to_json()})
    else:
        print_table(("run", report.directory), report.rows())
        click.echo()
        click.echo(f"The curve:       arb plot {report.directory}")
        click.echo(f"All data:        arb eval {report.directory}")
        if report.noun == "token":
            click.echo(f"Let it write:    arb generate {report.directory}")
        click.echo()
        print_table(("what the model stores", "elements", "bytes"), report.audit.table())
    report.raise_failed_checks()
