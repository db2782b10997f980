"""``arb doctor``: report what works here, what does not, and why."""

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

#: Distributions that the core itself needs. Those that components declare follow in the report, and
#: then those of the plugins.
_LIBRARIES = ("pluggy", "attrs", "cattrs", "click", "rich")
#: Linux: whether a program may have pages of 2 MiB (:mod:`arb_ternary.ternary.huge_pages`).
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@click.command()
@device_option
@click.option(
    "--report", is_flag=True, help="Print a Markdown report with every installed distribution."
)
@as_json
def doctor(device: str, report: bool, as_json: bool) -> int:
    """Say what works here and what does not.

    Exits with 2 if the environment names something unknown, with 3 if it names something that
    cannot work.
    """
    problems: list[ArbError] = []
    folder = Path.cwd()
    disk = shutil.disk_usage(folder)
    interface = ".".join(map(str, API_VERSION))
    torch, torch_line = _torch(problems)
    backend, backend_line = _backend(device, problems)
    facts: dict[str, Any] = {
        "arb": {"version": __version__, "plugin_interface": interface},
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "platform": platform.platform(),
        },
        "torch": torch,
        "distributions": _versions(every=report),
        "plugins": [record.to_json() for record in manager().records],
        "backend": backend,
        "backends": describe_backends(device),
        "huge_pages": _huge_pages(),
        "environment": given(manager().variables),
        "unrecognised_variables": unrecognised(manager().variables),
        "disk": {"folder": str(folder), "free_bytes": disk.free, "total_bytes": disk.total},
    }
    # A plugin that ARB_PLUGINS asks for by name has to work; one that is only installed need not.
    asked_for = [record for record in manager().records if record.name in PLUGINS.names()]
    problems += [
        EnvironmentProblem(f"ARB_PLUGINS: {record.fault}") for record in asked_for if record.failed
    ]

    if as_json:
        stated = [{"what": problem.what, "hint": problem.hint} for problem in problems]
        print_json({**facts, "problems": stated})
    else:
        lines = {
            "arb": f"{__version__} (plugins {interface})",
            "python": f"{platform.python_version()} ({sys.executable})",
            "platform": platform.platform(),
            "torch": torch_line,
            "backend": backend_line,
            "pages": _pages_line(facts["huge_pages"]),
            "disk": f"{disk.free / 2**30:.1f} GiB free of {disk.total / 2**30:.1f} in {folder}",
        }
        click.echo("```text\n" if report else "", nl=False)
        _print_text(lines, facts)
        click.echo("```\n" if report else "", nl=False)
    for problem in problems:
        click.echo(render(problem), err=True)
    return min((problem.exit_code for problem in problems), default=0)


def _torch(problems: list[ArbError]) -> tuple[dict[str, Any], str]:
    """Return the facts about torch, and one line about it; an import that fails is a problem."""
    try:
        import torch
    # A broken shared library raises OSError, and the report must be printed all the same.
    except Exception as error:
        problems.append(
            EnvironmentProblem(f"torch cannot be imported: {type(error).__name__}: {error}")
        )
        return {"version": None}, "cannot be imported"
    threads = torch.get_num_threads()
    cpu = torch.backends.cpu.get_cpu_capability()
    accelerator = "CPU only"
    if torch.version.cuda:
        accelerator = f"CUDA {torch.version.cuda}"
    elif torch.version.hip:
        accelerator = f"HIP {torch.version.hip}"
    facts = {
        "version": torch.__version__,
        "threads": threads,
        "cpu_capability": cpu,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }
    return facts, f"{torch.__version__}, {threads} threads, {cpu}, {accelerator}"


def _huge_pages() -> str:
    """Return the system's setting of transparent huge pages: ``always``, ``madvise`` or ``never``.

    ``none`` if the system has no such setting.
    """
    try:
        text = _HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return "none"
    return text.partition("[")[2].partition("]")[0] or "none"


def _pages_line(setting: str) -> str:
    """Return one line about the pages on which loaded weights lie."""
    pages = "huge pages" if setting in ("always", "madvise") else "ordinary pages"
    return f"{setting}: a loaded model lies on {pages}"


def _backend(device: str, problems: list[ArbError]) -> tuple[dict[str, Any], str]:
    """Return the facts about the choice of a backend, and one line about it."""
    request = request_backend(device=device)
    facts: dict[str, Any] = {
        "request": request.value,
        "source": request.source,
        "device": device,
        "name": None,
        "reason": "",
        "rejected": [],
    }
    try:
        selection = select(request)
        facts["name"] = selection.name
        facts["reason"] = selection.reason
        facts["rejected"] = [
            {"name": name, "reason": reason} for name, reason in selection.rejected
        ]
    except ArbError as error:
        problems.append(error)
        facts["reason"] = error.what
    source = f"{request.value!r} from {request.source}"
    if request.source == "default":
        source = "auto"
    name = facts["name"] or "none"
    return facts, f"{name} on {device}, {source}: {facts['reason']}"


def _versions(*, every: bool) -> dict[str, str]:
    """Return the versions of the distributions that matter, or of all."""
    found: dict[str, str] = {}
    for each in distributions():
        if each.name:
            found.setdefault(each.name, each.version)  # the first on the path is imported
    if every:
        return dict(sorted(found.items(), key=lambda item: item[0].lower()))
    wanted = [*_LIBRARIES]
    for component in manager().registry.everything():
        wanted.extend(component.spec.libraries)
    wanted.extend(record.distribution or "" for record in manager().records)
    return {name: found[name] for name in dict.fromkeys(wanted) if name in found}


def _print_text(lines: dict[str, str], facts: dict[str, Any]) -> None:
    """Print the report as text: the lines, then tables of plugins, backends and the rest."""
    for label, text in lines.items():
        click.echo(f"{label:<9} {text}")
    click.echo()
    plugins = [
        {**row, "distribution": row["distribution"] or row["module"]} for row in facts["plugins"]
    ]
    _print_rows("plugin", plugins, ("status", "distribution", "version", "reason"))
    _print_rows("backend", facts["backends"], ("status", "reason"))
    print_table(("distribution", "version"), list(facts["distributions"].items()))
    click.echo()
    if facts["environment"]:
        print_table(("variable", "value"), list(facts["environment"].items()))
    else:
        click.echo("no environment variable of arb is set")
    for name, close in facts["unrecognised_variables"].items():
        suggestion = f"; did you mean {close}?" if close else ""
        click.echo(f"{name} is not a variable of arb{suggestion}")


def _print_rows(kind: str, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    """Print some columns of rows as a table that begins with their names."""
    keys = ("name", *columns)
    cells = [[row[key] for key in keys] for row in rows]
    print_table((kind, *columns), cells)
    click.echo()
