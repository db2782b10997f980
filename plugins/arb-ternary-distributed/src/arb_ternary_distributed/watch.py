"""Signs of life: each rank gives them from a thread of its own, and names a rank that has stopped
giving any.

A rank that waits for the others, saves for an hour or evaluates goes on giving them. One that is
stopped, swapped out, or on a machine that has gone does not, and then the others would wait for
ever in whatever they do together.
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

#: Signs of life within the time limit.
_SIGNS: Final = 8
#: Seconds between two signs, at most.
_LONGEST: Final = 10.0


@frozen
class Member:
    """A process that trains with others; ``str()`` names it."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def end_process(error: ArbError) -> None:
    """Print ``error`` and end the process at once, from any thread: the main thread is waiting for
    a lost rank.
    """
    print(render(error), file=sys.stderr, flush=True)
    os._exit(error.exit_code)


class Watch:
    """Gives signs of life over ``store``, and watches those of the others, until it is closed.

    Args:
        store: where the ranks leave them; not used by others at the same time.
        members: all ranks, by number.
        rank: this one.
        limit: seconds without a sign after which a rank counts as lost.
        place: where the store is, for the error when it does not answer.
        on_loss: called once, in a thread of the watch, with an error that names who is lost.
    """

    def __init__(
        self,
        store: Store,
        members: Sequence[Member],
        rank: int,
        limit: float,
        place: str,
        on_loss: Callable[[ArbError], None] = end_process,
    ) -> None:
        self._store = store
        self._members = members
        self._rank = rank
        self._limit = limit
        self._place = place
        self._on_loss = on_loss
        self._period = min(_LONGEST, limit / _SIGNS)
        self._closed = threading.Event()
        self._answers = 0
        self._signs = [b""] * len(members)
        self._heard = Heard(len(members), limit, longest_tick=3 * self._period)
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._give, self._judge)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Give no more signs and look for none; the others may stop listening too."""
        self._closed.set()
        self._threads[1].join()

    def _give(self) -> None:
        keys = [f"sign/{member.rank}" for member in self._members]
        number = 0
        while not self._closed.is_set():
            number += 1
            try:
                self._store.set(keys[self._rank], str(number))
                signs = self._store.multi_get(keys)
            except RuntimeError:  # it is judged by how long it has not answered
                self._closed.wait(self._period)
                continue
            self._signs = signs
            # after the signs: whoever reads this number first sees signs at least as new
            self._answers += 1
            self._closed.wait(self._period)

    def _judge(self) -> None:
        while not self._closed.wait(self._period):
            answers = self._answers
            store, lost = self._heard.tick(time.monotonic(), answers, self._signs)
            if not (store or lost):
                continue
            limit = f"{self._limit:g} s, the limit of ARB_TERNARY_RANK_TIMEOUT"
            if store:
                what = f"rank {self._rank}: {self._place} has not answered for {limit}"
            else:
                names = ", ".join(str(self._members[rank]) for rank in lost)
                what = f"{names}: no sign of life for {limit}: stopped, ended or cut off"
            self._closed.set()
            again = (
                "Start again with --resume: the newest checkpoint is intact. torchrun "
                "--max-restarts N does so itself."
            )
            self._on_loss(ArbError(what, again))


class Heard:
    """What one rank has heard of the others, by a clock that runs only while the rank itself does.

    All times are taken at one place, :meth:`tick`. A tick that comes late counts as
    ``longest_tick``: the process stood still (it was stopped, or its machine slept) and could not
    have heard anybody meanwhile.

    Args:
        ranks: how many give signs.
        limit: seconds without a new sign after which a rank is lost.
        longest_tick: the most seconds that a tick adds to the clock.
    """

    def __init__(self, ranks: int, limit: float, longest_tick: float) -> None:
        self._limit = limit
        self._longest = longest_tick
        self._looked = time.monotonic()
        self._now = self._answered = 0.0
        self._answers = 0
        self._signs = [b""] * ranks
        self._seen = [0.0] * ranks

    def tick(self, now: float, answers: int, signs: Sequence[bytes]) -> tuple[bool, list[int]]:
        """Take in what has been heard by ``now``.

        Args:
            now: seconds of the monotonic clock.
            answers: how often the store has answered so far.
            signs: its newest answer, a sign of each rank.

        Returns:
            Whether the store itself has been silent for longer than the limit, and, if not, the
            ranks that have.
        """
        self._now += min(now - self._looked, self._longest)
        self._looked = now
        if answers != self._answers:
            self._answers = answers
            self._answered = self._now
            for rank, sign in enumerate(signs):
                if sign != self._signs[rank]:
                    self._signs[rank], self._seen[rank] = sign, self._now
        if self._now - self._answered > self._limit:
            return True, []
        # Counted to the last answer: while the store stands still, nobody can give a sign.
        return False, [
            rank for rank, seen in enumerate(self._seen) if self._answered - seen > self._limit
        ]
