"""Progress of a run: a bar on a terminal, plain lines elsewhere.

The log file of the run has the same as plain lines with the time.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TextIO

from attrs import define, field

from arb_ternary.errors import ArbError
from arb_ternary_train.directory import open_file, reason_of, write_line

#: Seconds between lines on the progress of an evaluation.
_EVALUATION_LINES: Final = 5.0
#: Columns of a terminal from which on the bar is long and has a title.
_WIDE: Final = 72


def format_duration(seconds: float) -> str:
    """Return a duration such as ``41s``, ``12m05s`` or ``3h07m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def format_bytes(number: int, largest: str = "GiB") -> str:
    """Return a size such as ``512 B``, ``1.5 KiB`` or ``20.0 MiB``, in units up to ``largest``."""
    units = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    for power in range(units.index(largest) + 1, 0, -1):
        if number >= 1024**power:
            return f"{number / 1024**power:.1f} {units[power - 1]}"
    return f"{number} B"


def describe(metrics: Mapping[str, Any], *, room: float = math.inf) -> str:
    """Return the numbers of one step as text, in their order, as many as fit into ``room``."""
    parts: list[str] = []
    for key, value in metrics.items():
        if key == "loss" and isinstance(value, float):
            parts.append(f"loss {value:.4f}")
        elif isinstance(value, float):
            parts.append(f"{key} {value:.4g}")
        else:
            parts.append(f"{key} {value}")
    while parts and len("  ".join(parts)) > room:
        parts.pop()
    return "  ".join(parts)


class LogFile:
    """Appends lines with the time to a file that a kill cannot leave unreadable.

    Raises:
        ArbError: it is not a file, or the system refuses.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArbError(f"{path.parent}: cannot be made: {reason_of(error)}") from error
        self._path = path
        self._file = open_file(path, "ab", buffering=0)

    def line(self, text: str) -> None:
        """Write one line.

        Raises:
            ArbError: the disk is full or refuses.
        """
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"
        write_line(self._file, self._path, line.encode(errors="backslashreplace"))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@define
class Silent:
    """Shows nothing on the screen; notes and logged steps still reach the log file.

    Subclasses show a person how the run proceeds.
    """

    log_file: LogFile | None = None
    _shown: float = field(default=0.0, init=False)

    def start(self, title: str, total: int, done: int) -> None:
        """Show that a phase begins, or continues, at step ``done`` of ``total``."""
        if self.log_file is not None:
            self.log_file.line(f"{title}: step {done} of {total}")

    def step(self, done: int, metrics: Mapping[str, Any], log: bool) -> None:
        """Show a step; ``log`` asks for a line that stays."""
        if log and self.log_file is not None:
            self.log_file.line(f"step {done}  {describe(metrics)}")

    def evaluating(self, batches: int) -> None:
        """Show the number of ``batches`` that an evaluation has done."""

    def _is_long(self, batches: int) -> bool:
        """Return whether another line on an evaluation is due."""
        now = time.monotonic()
        due = batches > 1 and now - self._shown >= _EVALUATION_LINES
        if due or batches == 1:
            self._shown = now
        return due

    def note(self, text: str) -> None:
        """Show a line that stays: an evaluation, a checkpoint, a skipped batch, a warning."""
        if self.log_file is not None:
            self.log_file.line(text)

    def stop(self) -> None:
        """Show that the phase is over."""


@define
class PlainReporter(Silent):
    """Prints a plain line for every logged step and every note."""

    stream: TextIO = field(factory=lambda: sys.stderr)
    _title: str = ""
    _total: int = 0
    _first: int = 0
    _started: float = 0.0

    def start(self, title: str, total: int, done: int) -> None:
        Silent.start(self, title, total, done)
        self._title = title
        self._total = total
        self._first = done
        self._started = time.monotonic()
        self._print(f"{title}: step {done} of {total}")

    def step(self, done: int, metrics: Mapping[str, Any], log: bool) -> None:
        Silent.step(self, done, metrics, log)
        if log:
            where = f"{self._title} {done}/{self._total}"
            self._print(f"{where}  {describe(metrics)}  left {self._left(done)}")

    def evaluating(self, batches: int) -> None:
        if self._is_long(batches):
            self._print(f"evaluating: {batches:,} batches done")

    def note(self, text: str) -> None:
        Silent.note(self, text)
        self._print(text)

    def _left(self, done: int) -> str:
        """Return the estimated time that the phase still takes."""
        taken = done - self._first
        if taken <= 0:
            return "?"
        per_step = (time.monotonic() - self._started) / taken
        return format_duration(per_step * (self._total - done))

    def _print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


@define
class RichReporter(Silent):
    """Shows a progress bar with the numbers of the step; notes scroll above it.

    Step, bar and time come first. The numbers take what is left of the line, and narrow terminals
    get a shorter bar.
    """

    _progress: Any = None
    _task: Any = None
    _taken: int = 0
    _open: ExitStack = field(factory=ExitStack)

    def start(self, title: str, total: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        Silent.start(self, title, total, done)
        console = Console(stderr=True)
        is_wide = console.width >= _WIDE
        bar = 16 if is_wide else 6
        # Between columns is a space. The time is mm:ss, from an hour on h:mm:ss.
        self._taken = bar + 2 * len(str(total)) + len(" / left h:mm:ss ")
        if is_wide:
            self._taken += len(title) + 1
        self._progress = Progress(
            *([TextColumn("{task.description}")] if is_wide else []),
            BarColumn(bar_width=bar),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
            console=console,
            refresh_per_second=4,
        )
        self._open.enter_context(self._progress)
        self._task = self._progress.add_task(title, total=total, completed=done, numbers="")

    def step(self, done: int, metrics: Mapping[str, Any], log: bool) -> None:
        Silent.step(self, done, metrics, log)
        if self._progress is not None:
            numbers = describe(metrics, room=self._progress.console.width - self._taken)
            self._progress.update(self._task, completed=done, numbers=numbers)

    def evaluating(self, batches: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, numbers=f"evaluating: {batches:,} batches done")
        elif self._is_long(batches):
            print(f"evaluating: {batches:,} batches done", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        Silent.note(self, text)
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def stop(self) -> None:
        self._open.close()
        self._progress = None


def make_reporter(log_file: LogFile | None = None, stream: TextIO | None = None) -> Silent:
    """Return a progress bar if ``stream`` (standard error) is a terminal, else plain lines."""
    stream = sys.stderr if stream is None else stream
    return RichReporter(log_file) if stream.isatty() else PlainReporter(log_file, stream)
