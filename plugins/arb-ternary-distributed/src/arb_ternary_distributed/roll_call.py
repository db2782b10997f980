"""How ranks find each other, and only each other: the store may hold what ranks that have ended
left there.

torchrun's store outlives an attempt. When a machine comes or goes, the new ranks even have the
restart count of those before them. So rank 0 calls the roll under a fresh name until each rank has
answered to exactly what it said of itself.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING, Final

from arb_ternary.errors import EnvironmentProblem
from arb_ternary_distributed.watch import Member

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

#: Seconds between two looks.
_PAUSE: Final = 0.05
#: Where rank 0 calls the roll.
_ROLL: Final = "roll"


def call_roll(store: Store, rank: int, size: int, patience: float) -> tuple[str, list[Member]]:
    """Wait for all ``size`` ranks; a name that is new and the same on all of them, and who they
    are.

    Raises:
        EnvironmentProblem: some have not come within ``patience`` seconds; which.
    """
    host = socket.gethostname()
    pid = os.getpid()
    mine = json.dumps([host, pid, secrets.token_hex(8)])
    store.set(f"here/{rank}", mine)
    until = time.monotonic() + patience
    name = ""
    called = [""] * size
    while True:
        if rank == 0:
            found = [_read(store, f"here/{other}") for other in range(size)]
            if all(found) and found != called:
                name = secrets.token_hex(8)
                called = found
                store.set(_ROLL, json.dumps([name, called]))
        elif roll := _read(store, _ROLL):
            name, called = json.loads(roll)
        if name and len(called) == size and called[rank] == mine:
            store.set(_answer(name, rank), "")
            if rank == 0 and store.check([_answer(name, other) for other in range(size)]):
                store.set(f"complete/{name}", "")
            if store.check([f"complete/{name}"]):
                return name, [
                    Member(number, *json.loads(each)[:2]) for number, each in enumerate(called)
                ]
        if time.monotonic() > until:
            raise _absence(
                store, rank, size, patience, name if called[rank : rank + 1] == [mine] else ""
            )
        time.sleep(_PAUSE)


def _read(store: Store, key: str) -> str:
    """What is there, or nothing; ``get`` alone would wait for it."""
    return str(store.get(key).decode()) if store.check([key]) else ""


def _answer(name: str, rank: int) -> str:
    return f"answer/{name}/{rank}"


def _absence(store: Store, rank: int, size: int, patience: float, name: str) -> EnvironmentProblem:
    if name:
        absent = [other for other in range(size) if not store.check([_answer(name, other)])]
    else:
        absent = [
            other for other in range(size) if other != rank and not store.check([f"here/{other}"])
        ] or [0]
    return EnvironmentProblem(
        f"rank {', '.join(map(str, absent))}: not here after {patience:g} s, of {size} ranks",
        "Start all of them, or look why they ended; ARB_TERNARY_RANK_TIMEOUT says how long the "
        "others wait.",
    )
