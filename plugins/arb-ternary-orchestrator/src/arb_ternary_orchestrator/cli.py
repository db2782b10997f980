"""``arb orchestrator``: explain the decisions of a run, and switch strategies by hand."""

from __future__ import annotations

from pathlib import Path

import click

from arb_ternary.cli.options import as_json, plugin_files
from arb_ternary.cli.output import print_json, print_table

_DECISIONS = ("phase", "step", "from", "to", "why")
_CANDIDATES = ("step", "candidate", "loss", "to", "reward", "steps", "", "time")


@click.group()
def orchestrator() -> None:
    """Explain the decisions of orchestrated runs, and switch strategies by hand."""


@orchestrator.command("explain")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@as_json
def explain(run: Path, as_json: bool) -> None:
    """Show the decisions of RUN: when, from which strategy to which, why, and what each candidate
    achieved and cost.
    """
    from arb_ternary_orchestrator.report import explain_run
    from arb_ternary_train.directory import RunDirectory

    found = explain_run(RunDirectory.existing(run))
    if as_json:
        print_json(found.to_json())
        return
    if found.decisions:
        print_table(_DECISIONS, found.decision_rows())
    candidates = list(found.candidate_rows())
    if candidates:
        click.echo()
        print_table(_CANDIDATES, candidates)
    if found.decisions:
        click.echo()
    for line in (*found.notes(), *found.summary()):
        click.echo(line)


@orchestrator.command("switch")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("name", metavar="NAME")
@plugin_files
def switch(run: Path, name: str) -> None:
    """Ask the process that trains in RUN to continue with the strategy NAME.

    It switches between two steps, after the hysteresis since its last decision, and writes a
    checkpoint. If no process trains, the next one that resumes the run switches.
    """
    from arb_ternary_orchestrator.control import request_switch
    from arb_ternary_train.directory import RunDirectory

    for line in request_switch(RunDirectory.existing(run), name):
        click.echo(line)
