"""Ranks find each other, whatever earlier ones have left behind."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch.distributed as dist

from arb_ternary.errors import EnvironmentProblem
from arb_ternary_distributed.roll_call import call_roll


def test_ranks_that_have_ended_are_not_taken_for_those_that_come() -> None:
    store = dist.HashStore()
    # All of an attempt that has ended, its roll among it; rank 1 of the new one is late.
    gone = [json.dumps(["elsewhere", 1000 + rank, "old"]) for rank in range(3)]
    for rank in range(3):
        store.set(f"here/{rank}", gone[rank])
        store.set(f"answer/before/{rank}", "")
    store.set("roll", json.dumps(["before", gone]))
    store.set("complete/before", "")

    def come(rank: int, after: float) -> tuple[str, list[int]]:
        time.sleep(after)
        name, members = call_roll(store, rank, 3, 30)
        assert [member.rank for member in members] == [0, 1, 2]
        return name, [member.pid for member in members]

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(come, range(3), (0.0, 0.6, 0.2)))
    assert len({name for name, _ in found}) == 1
    assert found[0][0] != "before"
    assert all(pids == [os.getpid()] * 3 for _, pids in found)


def test_a_rank_that_does_not_come_is_named_by_those_that_have() -> None:
    store = dist.HashStore()
    together = Barrier(2)

    def come(rank: int) -> str:
        together.wait()
        with pytest.raises(EnvironmentProblem) as caught:
            call_roll(store, rank, 4, 2.0)
        return caught.value.what

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(come, (0, 2))) == ["rank 1, 3: not here after 2 s, of 4 ranks"] * 2


def test_a_rank_that_ended_earlier_is_named_too() -> None:
    store = dist.HashStore()
    store.set("here/1", json.dumps(["elsewhere", 1, "old"]))
    with pytest.raises(EnvironmentProblem, match="rank 1: not here after"):
        call_roll(store, 0, 2, 0.3)
