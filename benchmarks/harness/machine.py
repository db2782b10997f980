"""The machine that a figure was measured on: processor, versions, load and commit of the code."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from arb_ternary_train.machine import processor_name


def machine_facts() -> dict[str, Any]:
    """Return processor, cores, threads, system, versions, commit of the code and load."""
    return {
        "processor": processor_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "commit": commit(),
        "load_average": load_average(),
    }


def describe(machine: Mapping[str, Any], *, threads: bool = True) -> str:
    """Return one sentence about what :func:`machine_facts` found, for the notes of a table.

    A result has ``load_average_at_end`` as well, which its script adds.
    """
    counted = f"{machine['cores']} cores"
    if threads:
        counted += f", {machine['threads']} threads"
    return (
        f"{machine['processor']}, {counted}, torch {machine['torch']} "
        f"({machine['torch_cpu_capability']}), commit "
        f"{machine['commit'] or 'unknown'}, load average {machine['load_average']} at the start "
        f"and {machine['load_average_at_end']} at the end."
    )


def load_average() -> float:
    """Return how many processes wanted to run in the last minute."""
    return round(os.getloadavg()[0], 2)


@contextmanager
def with_threads(threads: int | None) -> Iterator[int]:
    """Set the number of threads of torch, if one is given; yield how many there are."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def commit() -> str | None:
    """Return the commit of this clone, with ``+changes`` if files differ; None without git."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None
    return f"{head}+changes" if _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
