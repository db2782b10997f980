"""SIGINT and SIGTERM ask a run to stop after it has saved a checkpoint; a second one stops it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final, Self

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Notes the first signal within a ``with`` block; a second one raises KeyboardInterrupt.

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
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
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
        if self.requested:
            raise KeyboardInterrupt
        self.set(signal.Signals(number).name)
