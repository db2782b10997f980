"""The machine that a figure was measured on: processor, versions, load and commit of the code."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import arb_ternary
from arb_ternary.plugins.manager import manager


def machine_facts() -> dict[str, Any]:
    """Return processor, cores, system and library versions."""
    import torch

    from arb_ternary_train.machine import processor_name

    return {
        "processor": processor_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "arb-ternary-core": version("arb-ternary-core"),
    }


def bench_facts(backends: Sequence[str]) -> dict[str, Any]:
    """Return the facts of the machine, threads, load, and the distribution of each backend."""
    import torch

    return {
        **machine_facts(),
        "threads": torch.get_num_threads(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "backends": {name: _distribution(name) for name in backends},
        "commit": commit(),
        "load_average": load_average(),
    }


def describe(machine: Mapping[str, Any], *, threads: bool = True) -> str:
    """Return one sentence about what :func:`bench_facts` found, for the notes of a table."""
    counted = f"{machine['cores']} cores"
    if threads:
        counted += f", {machine['threads']} threads"
    return (
        f"{machine['processor']}, {counted}, torch {machine['torch']} "
        f"({machine['torch_cpu_capability']}), commit "
        f"{machine['commit'] or 'unknown'}, load average {machine['load_average']} at the start "
        f"and {machine['load_average_at_end']} at the end."
    )


def load_average() -> float | None:
    """Return how many processes wanted to run in the last minute, or None if that is unknown."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


@contextmanager
def with_threads(threads: int | None) -> Iterator[int]:
    """Set the number of threads of torch, if one is given; yield how many there are."""
    import torch

    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _distribution(backend: str) -> str:
    distribution = manager().registry.get("backend", backend).distribution
    if distribution is None:
        return "not a distribution"
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return distribution


def commit(folder: Path | None = None) -> str | None:
    """Return the commit of the source, with ``+changes`` if files differ; None if there is none.

    Args:
        folder: the folder of the source; by default that of the core.
    """
    where = Path(arb_ternary.__file__).parent if folder is None else folder
    head = _git(where, "rev-parse", "HEAD")
    tracked = _git(where, "ls-files", "--error-unmatch", ".")
    if head is None or tracked is None:
        return None  # no checkout, or an environment inside somebody else's
    changes = _git(where, "status", "--porcelain", "--untracked-files=no")
    return f"{head}+changes" if changes else head


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
