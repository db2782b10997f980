"""Devices of the processes that a launcher has started, and how they meet."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch.distributed as dist

from arb_ternary.errors import ConfigError, EnvironmentProblem
from arb_ternary_distributed.launch import device_for, meet
from arb_ternary_train.launcher import LaunchedProcess


def test_processes_share_no_device_but_the_cpu() -> None:
    here = LaunchedProcess(1, 2, 1, "node0", 1, 0, True)
    assert device_for("cpu", here).type == "cpu"
    for name in ("cuda:0", "mps"):
        with pytest.raises(ConfigError, match=f"device: {name}: 2 processes"):
            device_for(name, here)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        EnvironmentProblem,
        match="rank 6 is process 2 on its machine, counted from 0, and 2 GPUs are",
    ):
        device_for("cuda", LaunchedProcess(6, 8, 2, "node0", 1, 0, True))
    monkeypatch.setattr("arb_ternary_distributed.launch.resolve_device", torch.device)
    assert device_for("cuda", LaunchedProcess(5, 8, 1, "node0", 1, 0, True)) == torch.device(
        "cuda:1"
    )


def test_ranks_that_have_ended_are_not_met() -> None:
    store = dist.HashStore()
    # The store has all that an attempt which has ended left; rank 1 of the new one is late.
    gone = [json.dumps(["elsewhere", 1000 + rank, "old"]) for rank in range(3)]
    for rank in range(3):
        store.set(f"here/{rank}", gone[rank])
        store.set(f"answer/before/{rank}", "")
    store.set("call", json.dumps(["before", gone]))
    store.set("complete/before", "")

    def come(rank: int, after: float) -> list[int]:
        time.sleep(after)
        meeting = meet(store, rank, 3, 30)
        assert [member.rank for member in meeting.members] == [0, 1, 2]
        meeting.store.set(f"met/{rank}", "")
        return [member.pid for member in meeting.members]

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(come, range(3), (0.0, 0.6, 0.2)))
    assert found == [[os.getpid()] * 3] * 3
    # All three have met in one store, which is not that of the ranks that have ended.
    name, _ = json.loads(store.get("call"))
    assert name != "before"
    met = dist.PrefixStore(name, store)
    assert met.check([f"met/{rank}" for rank in range(3)])


def test_absent_ranks_are_named_by_those_present() -> None:
    store = dist.HashStore()
    together = Barrier(2)

    def come(rank: int) -> str:
        together.wait()
        with pytest.raises(EnvironmentProblem) as caught:
            meet(store, rank, 4, 2.0)
        return caught.value.what

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(come, (0, 2))) == ["rank 1, 3: not here after 2 s, of 4 ranks"] * 2


def test_a_rank_that_ended_earlier_counts_as_absent() -> None:
    store = dist.HashStore()
    store.set("here/1", json.dumps(["elsewhere", 1, "old"]))
    with pytest.raises(EnvironmentProblem, match="rank 1: not here after"):
        meet(store, 0, 2, 0.3)
