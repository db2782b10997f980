"""Signs of life: each rank gives them from a thread of its own, and names a rank that has stopped giving any.

A rank that waits for the others, saves for an hour or evaluates goes on giving them. One that is stopped, swapped out,
or on a machine that has gone does not, and then the others would wait for ever in whatever they do together.
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

__all__ = ["Member", "Watch", "end_process"]

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
    """Print ``error`` and end the process at once, from any thread: the main thread is waiting for a lost rank."""
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
        self._store, self._members, self._rank = store, members, rank
        self._limit, self._place, self._on_loss = limit, place, on_loss
        self._period = min(_LONGEST, limit / _SIGNS)
        self._closed = threading.Event()
        now = time.monotonic()
        self._answered = now
        self._signs = [b""] * len(members)
        self._seen = [now] * len(members)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._give, self._judge)]
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
            now = self._answered = time.monotonic()
            for rank, sign in enumerate(signs):
                if sign != self._signs[rank]:
                    self._signs[rank], self._seen[rank] = sign, now
            self._closed.wait(self._period)

    def _judge(self) -> None:
        looked = time.monotonic()
        while not self._closed.wait(self._period):
            now = time.monotonic()
            if (slept := now - looked) > 3 * self._period:
                # This process itself stood still, and has heard nobody meanwhile.
                self._answered += slept
                self._seen = [seen + slept for seen in self._seen]
            looked = now
            error = self._verdict(now)
            if error is not None:
                self._closed.set()
                self._on_loss(error)

    def _verdict(self, now: float) -> ArbError | None:
        limit = f"{self._limit:g} s, the limit of ARB_TERNARY_RANK_TIMEOUT"
        again = "Start again with --resume: the newest checkpoint is intact. torchrun --max-restarts N does so itself."
        if now - self._answered > self._limit:
            return ArbError(f"rank {self._rank}: {self._place} has not answered for {limit}", again)
        # While the store stands still, nobody can give a sign.
        lost = [m for m, seen in zip(self._members, self._seen, strict=True) if self._answered - seen > self._limit]
        if not lost:
            return None
        what = f"{', '.join(map(str, lost))}: no sign of life for {limit}: stopped, ended or cut off"
        return ArbError(what, again)
