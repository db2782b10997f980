"""Functions that run on several ranks at once, each in a process of its own, over gloo."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from arb_ternary_distributed.process_group import ProcessGroup


def on_ranks(
    size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120.0
) -> list[Any]:
    """What ``function(world, *arguments)`` returns on each of ``size`` ranks, by rank.

    The ranks are forked: what this process has imported need not be imported again, and they
    compute on the host.

    Args:
        size: how many ranks.
        function: it gets the ``World``; what it returns can be pickled.
        arguments: the same for all.
        seconds: how long it may take.

    Raises:
        AssertionError: a rank failed; with what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="arb-ranks-") as name:
        folder = Path(name)
        ranks = [
            get_context("fork").Process(target=_run, args=(folder, rank, size, function, arguments))
            for rank in range(size)
        ]
        with warnings.catch_warnings():
            # Python warns of a fork while other threads run; a rank takes no lock that those may
            # hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            for rank in ranks:
                rank.start()
        try:
            until = time.monotonic() + seconds
            for rank in ranks:
                rank.join(max(0.0, until - time.monotonic()))
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        for number, rank in enumerate(ranks):
            told = _log(folder, number).read_text() if rank.exitcode else ""
            assert rank.exitcode == 0, f"rank {number} ended with {rank.exitcode}:\n{told}"
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(size)]


def _log(folder: Path, rank: int) -> Path:
    return folder / f"log-{rank}"


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"


def _run(
    folder: Path, rank: int, size: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """One rank: it tells a file what it prints, and another one what ``function`` returns."""
    log = _log(folder, rank).open("w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    world = ProcessGroup(torch.device("cpu"))
    result = function(world, *arguments)
    _result(folder, rank).write_bytes(pickle.dumps(result))
    world.shutdown()
