"""A rank without heartbeats is named, and no other."""

from __future__ import annotations

import time
from pathlib import Path
from queue import Queue

import torch.distributed as dist

from arb_ternary.errors import ArbError
from arb_ternary_distributed.heartbeat import Heartbeat, Member, Silence

MEMBERS = [Member(0, "a", 10), Member(1, "b", 11), Member(2, "c", 12)]


def heartbeat_of(rank: int, folder: Path, lost: Queue[ArbError], limit: float) -> Heartbeat:
    return Heartbeat(
        dist.FileStore(str(folder / "store"), 3), MEMBERS, rank, limit, "the store", lost.put
    )


def test_only_a_silent_rank_is_named(tmp_path: Path) -> None:
    lost: list[Queue[ArbError]] = [Queue() for _ in MEMBERS]
    # Long enough that no thread of a busy machine stands still for so long while the others do not.
    beats = [heartbeat_of(rank, tmp_path, lost[rank], 3.0) for rank in range(3)]
    while any(beat._answers < 4 for beat in beats):
        time.sleep(0.01)
    assert all(queue.empty() for queue in lost)
    beats[1].close()
    for rank in (0, 2):
        error = lost[rank].get(timeout=300)
        assert error.what.startswith("rank 1 (host b, pid 11): no sign of life for 3 s")
    for rank in (0, 2):
        beats[rank].close()
    assert lost[1].empty()


def test_a_store_that_fails_is_named(tmp_path: Path) -> None:
    class Gone(dist.Store):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("connection reset")

    lost: Queue[ArbError] = Queue()
    beat = Heartbeat(Gone(), MEMBERS, 2, 0.5, "the store", lost.put)
    assert lost.get(timeout=300).what.startswith("rank 2: the store has not answered for 0.5 s")
    beat.close()


def test_time_of_a_stopped_process_does_not_count() -> None:
    # Either thread may wake first: the answer of the store may be new or not at the first tick.
    start = time.monotonic()
    for answers, beats in ((3, [b"3", b"3"]), (4, [b"4", b"3"]), (4, [b"4", b"4"])):
        silence = Silence(2, limit=2.0, longest_tick=0.75)
        assert silence.tick(start + 0.25, 2, [b"2", b"2"]) == (False, [])
        assert silence.tick(start + 0.5, 3, [b"3", b"3"]) == (False, [])
        assert silence.tick(start + 1000.5, answers, beats) == (False, [])
        assert silence.tick(start + 1000.75, 5, [b"5", beats[1]]) == (False, [])
        assert silence.tick(start + 1001.0, 6, [b"6", b"5"]) == (False, [])


def test_silence_is_counted_to_the_last_answer() -> None:
    start = time.monotonic()
    silence = Silence(2, limit=2.0, longest_tick=0.75)
    for tick in range(1, 10):  # rank 1 gives one sign, at 0.5 s; 2 s later nothing is said yet
        beats = [b"%d" % tick, b"2" if tick >= 2 else b""]
        assert silence.tick(start + 0.25 * tick, tick, beats) == (False, []), tick
    assert silence.tick(start + 2.5, 10, [b"10", b"2"]) == (False, [])
    assert silence.tick(start + 2.76, 11, [b"11", b"2"]) == (False, [1])


def test_a_silent_store_is_not_a_lost_rank() -> None:
    start = time.monotonic()
    silence = Silence(2, limit=2.0, longest_tick=0.75)
    for tick in range(1, 10):
        assert silence.tick(start + 0.25 * tick, 1, [b"1", b"1"]) == (False, [])
    assert silence.tick(start + 2.51, 1, [b"1", b"1"]) == (True, [])
