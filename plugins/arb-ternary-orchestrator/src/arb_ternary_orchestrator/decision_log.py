"""What was decided, and what it cost: one line a decision in ``orchestrator_decisions.jsonl``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from arb_ternary_train.durable import replacing
from arb_ternary_train.metrics import MetricsWriter, read_metrics, to_line

DECISIONS_FILE: Final = "orchestrator_decisions.jsonl"


def read_decisions(directory: Path) -> list[dict[str, Any]]:
    """The decisions of the run in ``directory``, in order; none where nothing has been decided.

    Raises:
        ArbError: a line before the last is not a JSON object.
    """
    path = directory / DECISIONS_FILE
    return read_metrics(path) if path.exists() else []


class DecisionLog:
    """Appends to the decisions of the run in ``directory``. Of their values only ``seconds``
    depends on the clock.

    Opened for the first decision: a run that decides nothing has no such file. What a killed run
    wrote after the moment that is gone on from is cut.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / DECISIONS_FILE
        self._directory = directory
        self._writer: MetricsWriter | None = None
        self.length = 0

    def begin_at(self, step: int) -> None:
        """Keep the decisions before the run's step ``step``: those of earlier loops."""
        self._cut(lambda index, record: record["step"] < step)

    def go_on_after(self, length: int) -> None:
        """Keep the first ``length`` decisions: those that the checkpoint knows."""
        self._cut(lambda index, record: index < length)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one decision.

        Raises:
            ArbError: the disk is full.
        """
        if self._writer is None:
            self._writer = MetricsWriter(self.path)
        self._writer.write(record)
        self.length += 1

    def sync(self) -> int:
        """Make what was written durable; the number of decisions."""
        if self._writer is not None:
            self._writer.sync()
        return self.length

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _cut(self, keeps: Callable[[int, Mapping[str, Any]], bool]) -> None:
        self.close()
        records = read_decisions(self._directory)
        kept = [record for index, record in enumerate(records) if keeps(index, record)]
        self.length = len(kept)
        if not self.path.exists():
            return
        if not kept:
            self.path.unlink()
            return
        with replacing(self.path) as temporary:
            temporary.write_bytes(b"".join(to_line(record) for record in kept))
