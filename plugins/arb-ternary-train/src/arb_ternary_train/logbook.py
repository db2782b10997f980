"""Metrics, screen and training speed of a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from attrs import define, field

from arb_ternary_train.metrics import MetricsWriter, NoMetrics
from arb_ternary_train.progress import Silent

#: Number of micro-batches over which the displayed speed is averaged.
_WINDOW: Final = 50
#: Numbers of a step that the screen shows first, and numbers that only the file has.
_FIRST: Final = ("loss", "flips", "lr", "rate", "grad_norm")
_FILE_ONLY: Final = frozenset({*_FIRST, "exponent_moves", "draws"})


@define(eq=False)
class Logbook:
    """The metrics file, the screen and the clock of a run.

    Attributes:
        metrics: the metrics file; only rank 0 writes it.
        reporter: the screen and the log file.
        noun: name of one prediction on the screen.
        train_tokens: predictions that this process has trained on.
        train_seconds: how long that took, without evaluations and checkpoints.
    """

    metrics: MetricsWriter | NoMetrics
    reporter: Silent
    noun: str = "token"
    train_tokens: int = 0
    train_seconds: float = 0.0
    _recent: deque[tuple[int, float]] = field(factory=lambda: deque(maxlen=_WINDOW))

    def count_training(self, tokens: int, seconds: float) -> None:
        """Count ``tokens`` that were trained on in ``seconds``."""
        self.train_tokens += tokens
        self.train_seconds += seconds
        self._recent.append((tokens, seconds))

    @property
    def tokens_per_second(self) -> float:
        """Recent training speed."""
        tokens = sum(count for count, _ in self._recent)
        seconds = sum(taken for _, taken in self._recent)
        return tokens / seconds if seconds else 0.0

    def show_step(self, phase_step: int, metrics: Mapping[str, Any], log: bool) -> None:
        """Show a step on the screen; ``log`` asks for a line that stays."""
        shown = {key: metrics[key] for key in _FIRST if key in metrics}
        if metrics.get("draws", 1) != 1:
            shown["draws"] = metrics["draws"]
        shown |= {key: value for key, value in metrics.items() if key not in _FILE_ONLY}
        unit = "tok/s" if self.noun == "token" else f"{self.noun}s/s"
        shown[unit] = round(self.tokens_per_second)
        self.reporter.step(phase_step, shown, log)
