"""What a figure was measured on: machine, versions, load, and the commit of the code where that can
be told.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import arb_ternary
from arb_ternary.plugins.manager import manager
from arb_ternary_bench.compare import machine_facts


def bench_facts(backends: Sequence[str]) -> dict[str, Any]:
    """Machine, threads, load, and the versions of core, of torch and of what supplies each
    backend.
    """
    return {
        **machine_facts(),
        "threads": torch.get_num_threads(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "backends": {name: _distribution(name) for name in backends},
        "commit": commit(),
        "load_average": load_average(),
    }


def load_average() -> float | None:
    """Processes that wanted to run in the last minute; None where the system does not tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _distribution(backend: str) -> str:
    distribution = manager().registry.get("backend", backend).distribution
    if distribution is None:
        return "not a distribution"
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return distribution


def commit(folder: Path | None = None) -> str | None:
    """The commit that the package's source is at, with ``+changes`` where files differ; None
    outside a checkout.

    Args:
        folder: of the source; that of this package if not given.
    """
    where = Path(arb_ternary.__file__).parent if folder is None else folder
    head = _git(where, "rev-parse", "HEAD")
    if head is None or _git(where, "ls-files", "--error-unmatch", ".") is None:
        return None  # no checkout, or an environment inside somebody else's
    return (
        f"{head}+changes" if _git(where, "status", "--porcelain", "--untracked-files=no") else head
    )


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
