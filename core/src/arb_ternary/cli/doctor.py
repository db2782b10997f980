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
from arb_ternary.cli.options import device as device_option
from arb_ternary.cli.output import print_json, print_table
from arb_ternary.environment import PLUGINS, given, unrecognised
from arb_ternary.errors import ArbError, EnvironmentProblem, render
from arb_ternary.plugins.manager import manager

# : Distributions that the core itself needs; those that components declare and those of the plugins
# follow.
_LIBRARIES = ("pluggy", "attrs", "cattrs", "click", "rich")


@click.command()
@device_option
@click.option(
    "--report", is_flag=True, help="Print a Markdown report with every installed distribution."
)
@as_json
def doctor(device: str, report: bool, as_json: bool) -> int:
    """Say what works here and what does not.

    Exits with 2 when the environment names something unknown, with 3 when it names something that
    cannot work.
    """
    problems: list[ArbError] = []
    folder = Path.cwd()
    interface = ".".join(map(str, API_VERSION))
    python = platform.python_version()
    (torch, torch_line) = _torch(problems)
    (backend, backend_line) = _backend(device, problems)
    disk = shutil.disk_usage(folder)
    facts: dict[str, Any] = {
        "arb": {"version": __version__, "plugin_interface": interface},
        "python": {
            "version": python,
            "executable": sys.executable,
            "platform": platform.platform(),
        },
        "torch": torch,
        "distributions": _versions(every=report),
        "plugins": [record.to_json() for record in manager().records],
        "backend": backend,
        "backends": describe_backends(device),
        "environment": given(manager().variables),
        "unrecognised_variables": unrecognised(manager().variables),
        "disk": {"folder": str(folder), "free_bytes": disk.free, "total_bytes": disk.total},
    }
    lines = {
        "arb": f"{__version__} (plugins {interface})",
        "python": f"{python} ({sys.executable})",
        "platform": facts["python"]["platform"],
        "torch": torch_line,
        "backend": backend_line,
        "disk": f"{disk.free / 2**30:.1f} GiB free of {disk.total / 2**30:.1f} in {folder}",
    }
    # A plugin that ARB_PLUGINS asks for by name has to work; one that is merely installed has not.
    problems += [
        EnvironmentProblem(f"ARB_PLUGINS: {record.fault}")
        for record in manager().records
        if record.name in PLUGINS.names() and record.failed
    ]
    if as_json:
        print_json(
            {
                **facts,
                "problems": [{"what": problem.what, "hint": problem.hint} for problem in problems],
            }
        )
    else:
        click.echo("```text\n" if report else "", nl=False)
        _print_text(lines, facts)
        click.echo("```\n" if report else "", nl=False)
    for problem in problems:
        click.echo(render(problem), err=True)
    return min((problem.exit_code for problem in problems), default=0)


def _torch(problems: list[ArbError]) -> tuple[dict[str, Any], str]:
    try:
        import torch
    # a broken shared library raises OSError, and the report must come out all the same
    except Exception as error:
        problems.append(
            EnvironmentProblem(f"torch cannot be imported: {type(error).__name__}: {error}")
        )
        return {"version": None}, "cannot be imported"
    threads = torch.get_num_threads()
    cpu = torch.backends.cpu.get_cpu_capability()
    built = torch.version
    accelerator = (
        f"CUDA {built.cuda}" if built.cuda else f"HIP {built.hip}" if built.hip else "CPU only"
    )
    return (
        {
            "version": torch.__version__,
            "threads": threads,
            "cpu_capability": cpu,
            "cuda": built.cuda,
            "hip": built.hip,
        },
        f"{torch.__version__}, {threads} threads, {cpu}, {accelerator}",
    )


def _backend(device: str, problems: list[ArbError]) -> tuple[dict[str, Any], str]:
    request = request_backend(device=device)
    try:
        selection = select(request)
        name = selection.name
        reason = selection.reason
        rejected = selection.rejected
    except ArbError as error:
        problems.append(error)
        name = None
        reason = error.what
        rejected = ()
    facts = {
        "request": request.value,
        "source": request.source,
        "device": device,
        "name": name,
        "reason": reason,
    }
    source = "auto" if request.source == "default" else f"{request.value!r} from {request.source}"
    return (
        {**facts, "rejected": [{"name": other, "reason": why} for other, why in rejected]},
        f"{name or 'none'} on {device}, {source}: {reason}",
    )


def _versions(*, every: bool) -> dict[str, str]:
    """Versions of the distributions that matter, or of all."""
    # The first on the path is the one that is imported.
    found = {each.name: each.version for each in reversed(list(distributions())) if each.name}
    if every:
        return dict(sorted(found.items(), key=lambda item: item[0].lower()))
    declared = [
        library for one in manager().registry.everything() for library in one.spec.libraries
    ]
    wanted = dict.fromkeys(
        [*_LIBRARIES, *declared, *(record.distribution for record in manager().records)]
    )
    return {name: found[name] for name in wanted if name in found}


def _print_text(lines: dict[str, str], facts: dict[str, Any]) -> None:
    for label, text in lines.items():
        click.echo(f"{label:<9} {text}")
    click.echo()
    plugins = [
        {**row, "distribution": row["distribution"] or row["module"]} for row in facts["plugins"]
    ]
    for kind, rows, columns in (
        ("plugin", plugins, ("status", "distribution", "version", "reason")),
        ("backend", facts["backends"], ("status", "reason")),
    ):
        print_table(
            (kind, *columns), [[row[column] for column in ("name", *columns)] for row in rows]
        )
        click.echo()
    print_table(("distribution", "version"), list(facts["distributions"].items()))
    click.echo()
    if facts["environment"]:
        print_table(("variable", "value"), list(facts["environment"].items()))
    else:
        click.echo("no environment variable of arb is set")
    for name, close in facts["unrecognised_variables"].items():
        click.echo(
            f"{name} is not a variable of arb" + (f"; did you mean {close}?" if close else "")
        )
