"""Signals that ask a run to stop after it has saved a checkpoint.

SIGINT and SIGTERM, of which a second one stops the run at once, and those that schedulers of
clusters send before they take a machine away: SIGHUP, SIGUSR1 and SIGUSR2.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final, Self

_AT_ONCE: Final = (signal.SIGINT, signal.SIGTERM)
#: Windows has none of the others.
_OTHERS: Final = ("SIGHUP", "SIGUSR1", "SIGUSR2")
_SIGNALS: Final = (
    *_AT_ONCE,
    *(signal.Signals[name] for name in _OTHERS if name in signal.Signals.__members__),
)


class StopRequest:
    """Notes the first signal within a ``with`` block.

    A second SIGINT or SIGTERM raises KeyboardInterrupt. One of the other signals that is ignored,
    as SIGHUP is under ``nohup``, stays ignored.

    Python cannot install handlers outside the main thread; :meth:`set` still works there.
    """

    def __init__(self) -> None:
        self._reason: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether the run should stop."""
        return self._reason is not None

    @property
    def reason(self) -> str:
        """Name of the signal or of what asked for the stop; empty if nothing did."""
        return self._reason or ""

    def set(self, reason: str) -> None:
        """Ask the run to stop, as a signal would."""
        self._reason = reason

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                ignored = signal.getsignal(number) is signal.SIG_IGN
                if number in _AT_ONCE or not ignored:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number in _AT_ONCE:
            raise KeyboardInterrupt
        self.set(self.reason or signal.Signals(number).name)
