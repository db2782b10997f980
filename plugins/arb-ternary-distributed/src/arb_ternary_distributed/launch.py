"""How processes that a launcher has started become the ranks of one process group.

Starting, restarting and stopping processes is left to the launcher. But torch does not name a rank
that does not arrive, and the store that torchrun shares with its processes keeps the addresses of
ranks that have ended. Therefore the ranks meet in :func:`meet` before ``init_process_group``.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Final

import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from arb_ternary.errors import ConfigError, EnvironmentProblem
from arb_ternary_distributed.process_group import PATIENCE, Member, ProcessGroup
from arb_ternary_train.launcher import RANK_TIMEOUT, LaunchedProcess
from arb_ternary_train.precision import resolve_device

#: How long to wait for all ranks to arrive if ARB_TERNARY_RANK_TIMEOUT sets no limit.
_ARRIVAL_TIMEOUT: Final = timedelta(minutes=30)
#: Seconds between two looks into the store while ranks arrive.
_PAUSE: Final = 0.05

#: Numbers the process groups of this process; a restarted process counts them in the same order.
_groups: Final = count()


@contextmanager
def init_distributed(device: str, process: LaunchedProcess) -> Iterator[ProcessGroup]:
    """Yield the process group that a launcher has started, once all ranks have arrived.

    Args:
        device: the config's; ``cuda`` becomes the GPU of the local rank.
        process: what the launcher says of this process.

    Raises:
        ConfigError: several processes would share a device that cannot be shared.
        EnvironmentProblem: not all ranks have arrived in time; it names those that have not.
    """
    group = _init_process_group(process, device_for(device, process))
    try:
        with _log_on_main(group):
            yield group
    except BaseException as error:
        cause = group.shutdown_after(error)
        if cause is not None:
            raise cause from error
        raise
    group.shutdown()


@contextmanager
def _log_on_main(group: ProcessGroup) -> Iterator[None]:
    """Log only warnings on other ranks than 0, because all ranks do the same."""
    logger = logging.getLogger("arb_ternary")
    before = logger.level
    if not group.is_main:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def device_for(name: str, process: LaunchedProcess) -> torch.device:
    """Return the device of one of several processes.

    Raises:
        ConfigError: ``name`` is a device that only one process can use.
        EnvironmentProblem: there is no GPU, or there are fewer than processes.
    """
    if name == "cuda":
        gpus = torch.cuda.device_count()
        if process.local_rank >= gpus > 0:
            raise EnvironmentProblem(
                f"device cuda: rank {process.rank} is process {process.local_rank} on its machine, "
                f"counted from 0, and {gpus} GPUs are here",
                f"Start at most {gpus} processes per machine: --nproc_per_node {gpus}",
            )
        return resolve_device(f"cuda:{process.local_rank}")
    if name != "cpu":
        raise ConfigError(
            f"device: {name}: {process.size} processes train together, and each needs a device of "
            f"its own",
            "Use device: cuda (each process takes the GPU of its local rank) or cpu.",
        )
    return resolve_device(name)


def _init_process_group(process: LaunchedProcess, device: torch.device) -> ProcessGroup:
    limit = RANK_TIMEOUT.integer()
    timeout = timedelta(seconds=limit) if limit else _ARRIVAL_TIMEOUT
    root = _root_store(process, timeout)
    # The launcher's store outlives a restart, with the keys of the attempt before it.
    prefix = f"arb{process.restarts}.{process.size}.{next(_groups)}"
    meeting = meet(PrefixStore(prefix, root), process.rank, process.size, timeout.total_seconds())

    backend = "gloo"
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", meeting.store),
        rank=process.rank,
        world_size=process.size,
        timeout=timeout if limit else PATIENCE,
    )
    return ProcessGroup(device, members=meeting.members, store=meeting.store, limit=limit)


@cache
def _root_store(process: LaunchedProcess, timeout: timedelta) -> Store:
    try:
        return TCPStore(
            process.address,
            process.port,
            process.size,
            is_master=process.rank == 0 and not process.hosted_by_launcher,
            timeout=timeout,
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise EnvironmentProblem(
            f"rank {process.rank}: no connection to {process.address}:{process.port}, where the "
            f"ranks meet: {error}",
            "MASTER_ADDR is the machine of rank 0, and MASTER_PORT a port that is free there.",
        ) from error


# --- how ranks meet


@frozen(eq=False)
class Meeting:
    """All ranks of a process group, and a store that only they use."""

    store: Store
    members: list[Member]


def meet(store: Store, rank: int, size: int, timeout: float) -> Meeting:
    """Wait until all ``size`` ranks are here.

    The store may hold what ranks that have ended left there: when a machine comes or goes, torchrun
    starts ranks again with the same restart count. Therefore each rank announces itself under a
    token, and rank 0 calls all ranks under a new name, again whenever an announcement changes,
    until each rank has answered to its own token.

    Raises:
        EnvironmentProblem: some ranks have not arrived within ``timeout`` seconds; it names them.
    """
    announcement = json.dumps([socket.gethostname(), os.getpid(), secrets.token_hex(8)])
    store.set(_announced(rank), announcement)
    deadline = time.monotonic() + timeout
    name = ""
    called = [""] * size
    while True:
        if rank == 0:
            found = [_read(store, _announced(other)) for other in range(size)]
            if all(found) and found != called:
                name = secrets.token_hex(8)
                called = found
                store.set("call", json.dumps([name, called]))
        elif call := _read(store, "call"):
            name, called = json.loads(call)

        is_called = bool(name) and len(called) == size and called[rank] == announcement
        if is_called:
            store.set(_answered(name, rank), "")
            if rank == 0 and store.check([_answered(name, other) for other in range(size)]):
                store.set(f"complete/{name}", "")
            if store.check([f"complete/{name}"]):
                hosts = [json.loads(each)[:2] for each in called]
                members = [Member(number, host, pid) for number, (host, pid) in enumerate(hosts)]
                return Meeting(PrefixStore(name, store), members)

        if time.monotonic() > deadline:
            absent = _absent(store, rank, size, name if is_called else "")
            raise EnvironmentProblem(
                f"rank {', '.join(map(str, absent))}: not here after {timeout:g} s, of {size} "
                f"ranks",
                "Start all of them, or find out why they ended; ARB_TERNARY_RANK_TIMEOUT sets how "
                "long the others wait.",
            )
        time.sleep(_PAUSE)


def _announced(rank: int) -> str:
    return f"here/{rank}"


def _answered(name: str, rank: int) -> str:
    return f"answer/{name}/{rank}"


def _read(store: Store, key: str) -> str:
    """Return what the store has under ``key``, or ""; ``get`` alone would wait for it."""
    return str(store.get(key).decode()) if store.check([key]) else ""


def _absent(store: Store, rank: int, size: int, name: str) -> list[int]:
    """Return the ranks that have not answered the call ``name``, or not announced themselves."""
    if name:
        return [other for other in range(size) if not store.check([_answered(name, other)])]
    others = [other for other in range(size) if other != rank]
    return [other for other in others if not store.check([_announced(other)])] or [0]
