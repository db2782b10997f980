"""Run a function on several ranks at once, each in its own process, over gloo."""

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
    """Return the results of ``function(world, *arguments)`` on ``size`` ranks, by rank.

    The ranks are forked, so they need not import again what this process has imported. They compute
    on the host.

    Args:
        size: number of ranks.
        function: takes the ``ProcessGroup``; its result can be pickled.
        arguments: further arguments, the same for all ranks.
        seconds: time limit.

    Raises:
        AssertionError: a rank failed; the message holds what it printed.
    """
    context = get_context("fork")
    with tempfile.TemporaryDirectory(prefix="arb-ranks-") as name:
        folder = Path(name)
        ranks = []
        for rank in range(size):
            arguments_of_rank = (folder, rank, size, function, arguments)
            ranks.append(context.Process(target=_run, args=arguments_of_rank))
        with warnings.catch_warnings():
            # Python warns of a fork while other threads run. A rank takes no lock that those
            # threads may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            for process in ranks:
                process.start()
        try:
            deadline = time.monotonic() + seconds
            for process in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in ranks:
                process.kill()
                process.join()

        for rank, process in enumerate(ranks):
            output = _log(folder, rank).read_text() if process.exitcode else ""
            assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}:\n{output}"
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(size)]


def _log(folder: Path, rank: int) -> Path:
    return folder / f"log-{rank}"


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"


def _run(
    folder: Path,
    rank: int,
    size: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Run one rank; write its output to one file and the result of ``function`` to another."""
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
