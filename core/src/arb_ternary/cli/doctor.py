"""``arb doctor``: what works here, what does not, and why."""

from __future__ import annotations

import platform
import shutil
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import click

from arb_ternary import API_VERSION, __version__
from arb_ternary.backends.select import request_backend, select
from arb_ternary.cli.backends_commands import describe_backends
from arb_ternary.cli.options import as_json
from arb_ternary.cli.output import print_json, print_table
from arb_ternary.environment import PLUGINS, given, unrecognised
from arb_ternary.errors import ArbError, EnvironmentProblem, render
from arb_ternary.plugins.discovery import Status
from arb_ternary.plugins.manager import manager

__all__ = ["doctor"]

#: Distributions that the core itself needs; those that components declare and those of the plugins follow.
_LIBRARIES = ("pluggy", "attrs", "cattrs", "click", "rich")


@click.command()
@click.option("--device", default="cpu", show_default=True, help="Device to ask about, e.g. cpu, cuda:0, mps.")
@click.option("--report", is_flag=True, help="Print a Markdown report with every installed distribution.")
@as_json
def doctor(device: str, report: bool, as_json: bool) -> int:
    """Say what works here and what does not.

    Exits with 2 when the environment names something unknown, with 3 when it names something that cannot work.
    """
    problems: list[ArbError] = []
    disk = shutil.disk_usage(Path.cwd())
    facts: dict[str, Any] = {
        "arb": {"version": __version__, "plugin_interface": ".".join(map(str, API_VERSION))},
        "python": {"version": platform.python_version(), "executable": sys.executable, "platform": platform.platform()},
        "torch": _torch_facts(problems),
        "distributions": _versions(every=report),
        "plugins": [record.to_json() for record in manager().records],
        "backend": _backend_facts(device, problems),
        "backends": describe_backends(device),
        "environment": given(manager().variables),
        "unrecognised_variables": unrecognised(manager().variables),
        "disk": {"folder": str(Path.cwd()), "free_bytes": disk.free, "total_bytes": disk.total},
    }
    # A plugin that ARB_PLUGINS asks for by name has to work; one that is merely installed has not.
    problems += [
        EnvironmentProblem(f"ARB_PLUGINS: {record.fault}")
        for record in manager().records
        if record.name in PLUGINS.names() and record.status not in (Status.OK, Status.BLOCKED)
    ]
    facts["problems"] = [{"what": problem.what, "hint": problem.hint} for problem in problems]
    if as_json:
        print_json(facts)
    else:
        click.echo("```text\n" if report else "", nl=False)
        _print_text(facts)
        click.echo("```\n" if report else "", nl=False)
    for problem in problems:
        click.echo(render(problem), err=True)
    return min((problem.exit_code for problem in problems), default=0)


def _torch_facts(problems: list[ArbError]) -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # a broken shared library raises OSError, and the report must come out all the same
        problems.append(EnvironmentProblem(f"torch cannot be imported: {type(error).__name__}: {error}"))
        return {"version": None}
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def _versions(*, every: bool) -> dict[str, str]:
    """Versions of the distributions that matter, or of all."""
    # The first on the path is the one that is imported.
    found = {each.name: each.version for each in reversed(list(distributions())) if each.name}
    if every:
        return dict(sorted(found.items(), key=lambda item: item[0].lower()))
    declared = [library for one in manager().registry.everything() for library in one.spec.libraries]
    wanted = dict.fromkeys([*_LIBRARIES, *declared, *(record.distribution for record in manager().records)])
    return {name: found[name] for name in wanted if name in found}


def _backend_facts(device: str, problems: list[ArbError]) -> dict[str, Any]:
    request = request_backend(device=device)
    facts: dict[str, Any] = {"request": request.value, "source": request.source, "device": device}
    try:
        selection = select(request)
    except ArbError as error:
        problems.append(error)
        return {**facts, "name": None, "reason": error.what, "rejected": []}
    rejected = [{"name": name, "reason": reason} for name, reason in selection.rejected]
    return {**facts, "name": selection.name, "reason": selection.reason, "rejected": rejected}


def _print_text(facts: dict[str, Any]) -> None:
    torch, disk, backend = facts["torch"], facts["disk"], facts["backend"]
    lines = [
        ("arb", f"{facts['arb']['version']} (plugins {facts['arb']['plugin_interface']})"),
        ("python", f"{facts['python']['version']} ({facts['python']['executable']})"),
        ("platform", facts["python"]["platform"]),
        ("torch", _torch_line(torch)),
        ("backend", f"{backend['name'] or 'none'} on {backend['device']}, {_source(backend)}: {backend['reason']}"),
        ("disk", f"{disk['free_bytes'] / 2**30:.1f} GiB free of {disk['total_bytes'] / 2**30:.1f} in {disk['folder']}"),
    ]
    for label, text in lines:
        click.echo(f"{label:<9} {text}")
    click.echo()
    plugins = [{**row, "distribution": row["distribution"] or row["module"]} for row in facts["plugins"]]
    for kind, rows, columns in (
        ("plugin", plugins, ("status", "distribution", "version", "reason")),
        ("backend", facts["backends"], ("status", "reason")),
    ):
        print_table((kind, *columns), [[row[column] for column in ("name", *columns)] for row in rows])
        click.echo()
    print_table(("distribution", "version"), list(facts["distributions"].items()))
    click.echo()
    if facts["environment"]:
        print_table(("variable", "value"), list(facts["environment"].items()))
    else:
        click.echo("no environment variable of arb is set")
    for name, close in facts["unrecognised_variables"].items():
        click.echo(f"{name} is not a variable of arb" + (f"; did you mean {close}?" if close else ""))


def _torch_line(torch: dict[str, Any]) -> str:
    if torch["version"] is None:
        return "cannot be imported"
    accelerator = f"CUDA {torch['cuda']}" if torch["cuda"] else f"HIP {torch['hip']}" if torch["hip"] else "CPU only"
    return f"{torch['version']}, {torch['threads']} threads, {torch['cpu_capability']}, {accelerator}"


def _source(backend: dict[str, Any]) -> str:
    return f"{backend['request']!r} from {backend['source']}" if backend["source"] != "default" else "auto"
