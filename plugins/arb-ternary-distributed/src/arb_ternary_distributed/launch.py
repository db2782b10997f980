"""How processes that a launcher has started become the ranks of one run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from arb_ternary.errors import ConfigError, EnvironmentProblem
from arb_ternary_distributed.process_group import ProcessGroup
from arb_ternary_distributed.roll_call import call_roll
from arb_ternary_distributed.watch import Watch
from arb_ternary_train.launcher import RANK_TIMEOUT, LaunchedProcess
from arb_ternary_train.precision import resolve_device

# : How long a collective may wait: a rank that is lost is found by its signs of life, and a save
# may take hours.
_PATIENCE: Final = timedelta(days=7)
#: How long to wait for all ranks at the start where no limit is set.
_START: Final = timedelta(minutes=30)

# : Numbers the worlds that this process joins, one after another: those of a process that is
# started anew as before.
_worlds: Final = count()


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
    world = _join(process, device_for(device, process))
    try:
        with _log_warnings_only(unless=world.is_main):
            yield world
    except BaseException as error:
        if (cause := world.leave(error)) is not None:
            raise cause from error
        raise
    world.close()


@contextmanager
def _log_warnings_only(*, unless: bool) -> Iterator[None]:
    """Only rank 0 logs what all ranks do alike; warnings come from every rank."""
    logger = logging.getLogger("arb_ternary")
    before = logger.level
    if not unless:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def device_for(name: str, place: LaunchedProcess) -> torch.device:
    """The device of one of several processes.

    Raises:
        ConfigError: ``name`` is one that only one process can use.
        EnvironmentProblem: there is no GPU here, or there are fewer than processes.
    """
    if name == "cuda":
        if place.local_rank >= (here := torch.cuda.device_count()) > 0:
            raise EnvironmentProblem(
                f"device cuda: rank {place.rank} is process {place.local_rank} on its machine, "
                f"counted from 0, and {here} GPUs are here",
                f"Start at most {here} processes a machine: --nproc_per_node {here}",
            )
        return resolve_device(f"cuda:{place.local_rank}")
    if name != "cpu":
        raise ConfigError(
            f"device: {name}: {place.size} processes train together, and each needs a device of "
            f"its own",
            "Use device: cuda (each process takes the GPU of its number) or cpu.",
        )
    return resolve_device(name)


def _patience() -> timedelta:
    """How long to wait at the start."""
    limit = RANK_TIMEOUT.integer()
    return timedelta(seconds=limit) if limit else _START


def _join(place: LaunchedProcess, device: torch.device) -> ProcessGroup:
    limit = RANK_TIMEOUT.integer()
    patience = _patience()
    root = _root_store(place, patience)
    # An elastic restart finds the keys of the attempt before it in the launcher's store, the
    # addresses among them.
    number = next(_worlds)
    meeting = PrefixStore(f"arb{place.restarts}.{place.size}.{number}", root)
    name, members = call_roll(meeting, place.rank, place.size, patience.total_seconds())
    store = PrefixStore(name, meeting)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=place.rank,
        world_size=place.size,
        timeout=_PATIENCE,
    )
    watch = None
    if limit:
        owner = "torchrun" if place.hosted_by_launcher else str(members[0])
        where = f"the place to meet at {place.address}:{place.port} ({owner})"
        signs = PrefixStore("watch", store.clone())  # type: ignore[attr-defined]
        watch = Watch(signs, members, place.rank, limit, where)
    return ProcessGroup(
        device,
        members=members,
        farewells=store,
        watch=watch,
    )


@cache
def _root_store(place: LaunchedProcess, patience: timedelta) -> Store:
    try:
        return TCPStore(
            place.address,
            place.port,
            place.size,
            is_master=place.rank == 0 and not place.hosted_by_launcher,
            timeout=patience,
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise EnvironmentProblem(
            f"rank {place.rank}: no connection to {place.address}:{place.port}, where the ranks "
            f"meet: {error}",
            "MASTER_ADDR is the machine of rank 0, and MASTER_PORT a port that is free there.",
        ) from error
