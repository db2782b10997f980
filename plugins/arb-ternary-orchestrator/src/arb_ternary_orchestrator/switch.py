"""Asking a run for another strategy."""

from __future__ import annotations

from arb_ternary.config.fields import to_plain
from arb_ternary.errors import UsageProblem, nearest
from arb_ternary.plugins.manager import manager
from arb_ternary_orchestrator.control import ControlFile
from arb_ternary_orchestrator.explain import policies_in
from arb_ternary_orchestrator.strategies.lookup import strategies_named
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.loading import load_config


def request_switch(run: RunDirectory, name: str) -> list[str]:
    """Leave a request for the strategy ``name`` in the run's directory; what to tell the person who
    asked, in lines.

    Raises:
        UsageProblem: the run has no orchestrator, has ended, or does not choose among strategies of
            this name.
        EnvironmentProblem: the strategy's plugin is not installed.
    """
    # Loads the config's own plugin files as well: they may bring strategies.
    policies = policies_in(run, to_plain(load_config(run.config_file).config, given=False))
    if run.result_file.exists():
        raise UsageProblem(
            f"{run.path}: the run has ended; there is nothing left to switch",
            f"What was decided in it: arb orchestrator explain {run.path}",
        )
    manager().registry.get("strategy", name)
    options = [
        (each["initial_strategy"], each["safety_strategy"], each["strategies"]) for each in policies
    ]
    allowed = {name for named in options for name in strategies_named(*named)}
    if name not in allowed:
        close = nearest(name, allowed)
        hint = f"did you mean {close!r}?\n" if close else ""
        raise UsageProblem(
            f"{run.path}: the run does not choose among strategies of the name {name!r}",
            f"{hint}its strategies: {', '.join(sorted(allowed))}",
        )
    waiting = _waiting(ControlFile(run.path))
    ControlFile(run.path).write(name)
    lines = [f"{run.path}: asked for the strategy {name}"]
    if waiting is not None:
        lines.append(f"An earlier request, for {waiting}, had not been taken yet; it is dropped.")
    lines += [
        "A process that trains there takes it between two steps, once the hysteresis since its "
        "last decision is over.",
        "If none does, the next one takes it that continues the run with --resume.",
    ]
    return lines


def _waiting(control: ControlFile) -> str | None:
    try:
        request = control.read()
    except ValueError:
        return None  # it was no request; a new one takes its place
    return None if request is None else request.name
