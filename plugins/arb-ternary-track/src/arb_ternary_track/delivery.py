"""The thread that hands points to a tracker."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Final

from attrs import evolve

from arb_ternary.plugins.hooks import describe_exception
from arb_ternary_track.points import Point, TrackedRun
from arb_ternary_track.writer import Progress, Writer

#: Least seconds between two calls of a writer, so that it gets many points at a time.
_PAUSE: Final = 0.2
#: A call that has lasted so many times as long as the end of a run waits is taken to hang.
_HANGS: Final = 3


class Delivery:
    """Writes points in a thread of its own, and never waits for it before the run ends.

    A point is dropped if the queue is full or if the writer raises. Points are counted as written
    before they are: after a kill, the last ones may be absent, and none is there twice.

    Attributes:
        offered: points of the run.
        error: the first error, in one line; None if there is none.

    Args:
        writer: writes the points.
        run: the run; ``id`` and ``resumed`` are read from ``file``.
        file: see ``Progress``.
        capacity: most points that wait.
    """

    def __init__(self, writer: Writer, run: TrackedRun, file: Path, capacity: int) -> None:
        self.offered = 0
        self.error: str | None = None
        self._writer = writer
        self._run = run
        self._file = file
        self._written = 0
        self._failed = False
        self._broken = False
        #: When the call of the writer began that has not ended.
        self._call_began: float | None = None
        # None asks the thread to end.
        self._queue: Queue[Point | None] = Queue(capacity)
        self._closing = Event()
        self._thread = Thread(target=self._work, name=f"tracker {writer.key}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Number of points that are not written."""
        return self.offered - self._written

    def offer(self, make: Callable[[], Point | None]) -> None:
        """Queue the point that ``make`` returns, unless it is None.

        An error of ``make`` drops the point.
        """
        try:
            point = make()
        except Exception as error:
            self.offered += 1
            self._note_error(error)
            return
        if point is None:
            return
        self.offered += 1
        if self._broken:
            return
        try:
            self._queue.put_nowait(point)
        except Full:
            # The points that are not written are counted in the end.
            return

    def close(self, seconds: float, *, failed: bool) -> bool:
        """Wait up to ``seconds`` for the rest; return whether everything has ended by then.

        There is no wait for a writer that hangs already.

        Args:
            seconds: how long to wait.
            failed: whether the run has failed.
        """
        began = self._call_began
        if began is not None and time.monotonic() - began > _HANGS * seconds:
            seconds = 0
        deadline = time.monotonic() + seconds
        self._failed = failed
        self._closing.set()
        if not self._broken:
            try:
                self._queue.put(None, timeout=seconds)
            except Full:
                return False
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            progress = self._open()
            while self._deliver(progress):
                self._closing.wait(_PAUSE)
            self._writer.close(self._failed)
        except Exception as error:
            self._broken = True
            self._note_error(error)

    def _open(self) -> Progress:
        progress = Progress.load(self._file)
        resumed = self._file.exists()
        if self._writer.rewinds:
            progress.rewind(self._run.step)
        # Before the first point: a run that is killed then has this identity too.
        progress.save()
        run = evolve(self._run, id=progress.id, resumed=resumed)
        self._call(lambda: self._writer.open(run))
        return progress

    def _deliver(self, progress: Progress) -> bool:
        """Write what is in the queue, at least one point; return whether more will come."""
        taken = [self._queue.get()]
        try:
            while True:
                taken.append(self._queue.get_nowait())
        except Empty:
            points = [point for point in taken if point is not None]
        try:
            new = progress.take_new(points)
            if new:
                progress.save()
                self._call(lambda: self._writer.write(new))
            self._written += len(points)
        except Exception as error:
            # The next points may find the disk or the network in order again.
            self._note_error(error)
        return len(points) == len(taken)

    def _call(self, function: Callable[[], None]) -> None:
        self._call_began = time.monotonic()
        try:
            function()
        finally:
            self._call_began = None

    def _note_error(self, error: Exception) -> None:
        if self.error is None:
            self.error = describe_exception(error)
