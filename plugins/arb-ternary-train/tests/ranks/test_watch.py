"""A rank that gives no sign of life is named, and no other."""

from __future__ import annotations

import time
from pathlib import Path
from queue import Empty, Queue

import pytest
import torch.distributed as dist

from arb_ternary.errors import ArbError
from arb_ternary_train.ranks.watch import Member, Watch

MEMBERS = [Member(0, "a", 10), Member(1, "b", 11), Member(2, "c", 12)]


def watch_of(rank: int, folder: Path, told: Queue[ArbError], limit: float) -> Watch:
    return Watch(dist.FileStore(str(folder / "store"), 3), MEMBERS, rank, limit, "the store", told.put)


def test_only_the_rank_without_a_sign_is_named(tmp_path: Path) -> None:
    told: list[Queue[ArbError]] = [Queue() for _ in MEMBERS]
    watches = [watch_of(rank, tmp_path, told[rank], 1.0) for rank in range(3)]
    time.sleep(2.0)
    assert all(queue.empty() for queue in told)
    watches[1].close()
    for rank in (0, 2):
        error = told[rank].get(timeout=20)
        assert error.what.startswith("rank 1 (host b, pid 11): no sign of life for 1 s")
    for rank in (0, 2):
        watches[rank].close()
    assert told[1].empty()


def test_a_store_that_fails_is_named(tmp_path: Path) -> None:
    class Gone(dist.Store):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("connection reset")

    told: Queue[ArbError] = Queue()
    watch = Watch(Gone(), MEMBERS, 2, 0.5, "the store", told.put)
    assert told.get(timeout=20).what.startswith("rank 2: the store has not answered for 0.5 s")
    watch.close()


def test_time_in_which_the_process_itself_stood_still_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: Queue[ArbError] = Queue()
    ahead = [0.0]
    clock = time.monotonic
    monkeypatch.setattr("arb_ternary_train.ranks.watch.time.monotonic", lambda: clock() + ahead[0])
    watches = [watch_of(rank, tmp_path, told, 2.0) for rank in range(3)]
    time.sleep(0.5)
    ahead[0] = 1000.0
    with pytest.raises(Empty):
        told.get(timeout=1.0)
    for watch in watches:
        watch.close()
