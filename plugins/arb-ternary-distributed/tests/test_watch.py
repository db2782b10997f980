"""A rank that gives no sign of life is named, and no other."""

from __future__ import annotations

import time
from pathlib import Path
from queue import Queue

import torch.distributed as dist

from arb_ternary.errors import ArbError
from arb_ternary_distributed.watch import Heard, Member, Watch

MEMBERS = [Member(0, "a", 10), Member(1, "b", 11), Member(2, "c", 12)]


def watch_of(rank: int, folder: Path, told: Queue[ArbError], limit: float) -> Watch:
    return Watch(
        dist.FileStore(str(folder / "store"), 3), MEMBERS, rank, limit, "the store", told.put
    )


def test_only_the_rank_without_a_sign_is_named(tmp_path: Path) -> None:
    told: list[Queue[ArbError]] = [Queue() for _ in MEMBERS]
    # Long enough that no thread of a busy machine stands still for so long while the others do not.
    watches = [watch_of(rank, tmp_path, told[rank], 3.0) for rank in range(3)]
    while any(watch._answers < 4 for watch in watches):
        time.sleep(0.01)
    assert all(queue.empty() for queue in told)
    watches[1].close()
    for rank in (0, 2):
        error = told[rank].get(timeout=300)
        assert error.what.startswith("rank 1 (host b, pid 11): no sign of life for 3 s")
    for rank in (0, 2):
        watches[rank].close()
    assert told[1].empty()


def test_a_store_that_fails_is_named(tmp_path: Path) -> None:
    class Gone(dist.Store):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("connection reset")

    told: Queue[ArbError] = Queue()
    watch = Watch(Gone(), MEMBERS, 2, 0.5, "the store", told.put)
    assert told.get(timeout=300).what.startswith("rank 2: the store has not answered for 0.5 s")
    watch.close()


def test_time_in_which_the_process_itself_stood_still_does_not_count() -> None:
    """Whichever of its two threads wakes first: the store's answer may or may not be new when the
    clock is read.
    """
    start = time.monotonic()
    for answers, signs in ((3, [b"3", b"3"]), (4, [b"4", b"3"]), (4, [b"4", b"4"])):
        heard = Heard(2, limit=2.0, longest_tick=0.75)
        assert heard.tick(start + 0.25, 2, [b"2", b"2"]) == (False, [])
        assert heard.tick(start + 0.5, 3, [b"3", b"3"]) == (False, [])
        assert heard.tick(start + 1000.5, answers, signs) == (False, [])
        assert heard.tick(start + 1000.75, 5, [b"5", signs[1]]) == (False, [])
        assert heard.tick(start + 1001.0, 6, [b"6", b"5"]) == (False, [])


def test_a_silence_is_counted_from_the_last_sign_to_the_last_answer() -> None:
    start = time.monotonic()
    heard = Heard(2, limit=2.0, longest_tick=0.75)
    for tick in range(1, 10):  # rank 1 gives one sign, at 0.5 s; 2 s later nothing is said yet
        signs = [b"%d" % tick, b"2" if tick >= 2 else b""]
        assert heard.tick(start + 0.25 * tick, tick, signs) == (False, []), tick
    assert heard.tick(start + 2.5, 10, [b"10", b"2"]) == (False, [])
    assert heard.tick(start + 2.76, 11, [b"11", b"2"]) == (False, [1])


def test_a_silent_store_is_not_a_lost_rank() -> None:
    start = time.monotonic()
    heard = Heard(2, limit=2.0, longest_tick=0.75)
    for tick in range(1, 10):
        assert heard.tick(start + 0.25 * tick, 1, [b"1", b"1"]) == (False, [])
    assert heard.tick(start + 2.51, 1, [b"1", b"1"]) == (True, [])
