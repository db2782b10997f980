"""Heartbeats of ranks: each rank sends them from its own thread, and names a rank that stops.

A rank that waits for the others, saves for an hour or evaluates goes on sending them. A rank that
is stopped, swapped out, or on a machine that is gone does not; the others would wait for it for
ever in their next collective.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from attrs import frozen

from arb_ternary.errors import ArbError, render

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

#: Heartbeats within the time limit.
_BEATS: Final = 8
#: Most seconds between two heartbeats.
_LONGEST: Final = 10.0


@frozen
class Member:
    """A process of a process group; ``str()`` names it."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def end_process(error: ArbError) -> None:
    """Print ``error`` and end the process at once.

    The main thread is waiting for a lost rank in a collective, and cannot raise the error.
    """
    print(render(error), file=sys.stderr, flush=True)
    os._exit(error.exit_code)


class Heartbeat:
    """Sends heartbeats over ``store`` and watches those of the other ranks, until it is closed.

    Args:
        store: for heartbeats only; nothing else uses this connection at the same time.
        members: all ranks, by number.
        rank: this one.
        limit: seconds without a heartbeat after which a rank counts as lost.
        where: where the store is, for the error if it does not answer.
        on_loss: called once, in a thread of the heartbeat, with an error that names what is lost.
    """

    def __init__(
        self,
        store: Store,
        members: Sequence[Member],
        rank: int,
        limit: float,
        where: str,
        on_loss: Callable[[ArbError], None] = end_process,
    ) -> None:
        self._store = store
        self._members = members
        self._rank = rank
        self._limit = limit
        self._where = where
        self._on_loss = on_loss
        self._period = min(_LONGEST, limit / _BEATS)
        self._closed = threading.Event()
        self._answers = 0
        self._beats = [b""] * len(members)
        self._silence = Silence(len(members), limit, longest_tick=3 * self._period)
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._sender.start()
        self._watcher.start()

    def close(self) -> None:
        """Stop sending and watching; the other ranks may do so too."""
        self._closed.set()
        self._watcher.join()

    def _send(self) -> None:
        keys = [f"beat/{member.rank}" for member in self._members]
        number = 0
        while not self._closed.is_set():
            number += 1
            try:
                self._store.set(keys[self._rank], str(number))
                beats = self._store.multi_get(keys)
            except RuntimeError:  # the watcher measures how long the store has not answered
                self._closed.wait(self._period)
                continue
            self._beats = beats
            # After the beats: whoever reads this number first sees beats at least as new.
            self._answers += 1
            self._closed.wait(self._period)

    def _watch(self) -> None:
        while not self._closed.wait(self._period):
            answers = self._answers
            is_store_silent, lost = self._silence.tick(time.monotonic(), answers, self._beats)
            if not is_store_silent and not lost:
                continue
            limit = f"{self._limit:g} s, the limit of ARB_TERNARY_RANK_TIMEOUT"
            if is_store_silent:
                what = f"rank {self._rank}: {self._where} has not answered for {limit}"
            else:
                names = ", ".join(str(self._members[rank]) for rank in lost)
                what = f"{names}: no sign of life for {limit}: stopped, ended or cut off"
            self._closed.set()
            again = (
                "Start again with --resume: the newest checkpoint is intact. torchrun "
                "--max-restarts N does so itself."
            )
            self._on_loss(ArbError(what, again))


class Silence:
    """How long ranks have been silent, by a clock that runs only while this process runs.

    All times are taken in :meth:`tick`. A late tick counts as ``longest_tick``: the process stood
    still (it was stopped, or its machine slept) and could not have heard any rank meanwhile.

    Args:
        ranks: how many send heartbeats.
        limit: seconds without a new heartbeat after which a rank is lost.
        longest_tick: most seconds that a tick adds to the clock.
    """

    def __init__(self, ranks: int, limit: float, longest_tick: float) -> None:
        self._limit = limit
        self._longest = longest_tick
        self._looked = time.monotonic()
        self._now = 0.0
        self._answered = 0.0
        self._answers = 0
        self._beats = [b""] * ranks
        self._heard = [0.0] * ranks

    def tick(self, now: float, answers: int, beats: Sequence[bytes]) -> tuple[bool, list[int]]:
        """Take in what has been heard by ``now``.

        Args:
            now: seconds of the monotonic clock.
            answers: how often the store has answered so far.
            beats: its newest answer: the last heartbeat of each rank.

        Returns:
            Whether the store itself has been silent for longer than the limit; and, if not, the
            ranks that have.
        """
        self._now += min(now - self._looked, self._longest)
        self._looked = now
        if answers != self._answers:
            self._answers = answers
            self._answered = self._now
            for rank, beat in enumerate(beats):
                if beat != self._beats[rank]:
                    self._beats[rank] = beat
                    self._heard[rank] = self._now
        if self._now - self._answered > self._limit:
            return True, []
        # Counted to the last answer: while the store stands still, no rank can be heard.
        lost = [
            rank for rank, heard in enumerate(self._heard) if self._answered - heard > self._limit
        ]
        return False, lost
