"""``arb orchestrator``: look at what was decided in a run, and ask a running one for another
strategy.
"""

from __future__ import annotations

from pathlib import Path

import click

from arb_ternary.cli.options import as_json, plugin_files
from arb_ternary.cli.output import print_json, print_table

_DECISIONS = ("step", "from", "to", "why")
_CANDIDATES = ("step", "candidate", "loss", "to", "reward", "steps", "", "time")


@click.group()
def orchestrator() -> None:
    """Strategies of a run: what was decided, and switching by hand."""


@orchestrator.command("explain")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@as_json
def explain(run: Path, as_json: bool) -> None:
    """Tell the decisions of RUN: when, from which strategy to which, why, what each candidate
    reached, at what cost.
    """
    from arb_ternary_orchestrator.explain import explain_run
    from arb_ternary_train.directory import RunDirectory

    found = explain_run(RunDirectory.existing(run))
    if as_json:
        print_json(found.to_json())
        return
    if found.decisions:
        print_table(
            ("phase", *_DECISIONS) if found.several_phases else _DECISIONS, found.decision_rows()
        )
    if candidates := list(found.candidate_rows()):
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
    """Ask the process that trains in RUN to go on with the strategy NAME.

    It does so between two steps, as soon as the hysteresis since its last decision has passed, and
    writes a checkpoint. Where no process trains, the next one that resumes the run does.
    """
    from arb_ternary_orchestrator.switch import request_switch
    from arb_ternary_train.directory import RunDirectory

    for line in request_switch(RunDirectory.existing(run), name):
        click.echo(line)
