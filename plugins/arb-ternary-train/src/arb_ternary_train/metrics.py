"""``metrics.jsonl``: one JSON object a line, one line an event, deterministic to the byte.

A line holds nothing that depends on the clock, so that the file of a run that was killed and
resumed equals the file of a run that was not. A checkpoint stores how long the file was; a resume
cuts it there, which also removes a line that a kill tore.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from arb_ternary.errors import ArbError


def to_line(record: Mapping[str, Any]) -> bytes:
    """One line of the file. JSON has no non-finite numbers: they become the strings ``nan``,
    ``inf`` and ``-inf``.
    """
    return (
        json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False) + "\n"
    ).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


class MetricsWriter:
    """Appends records to ``path``; each line reaches the operating system in one write, before
    ``write`` returns.
    """

    def __init__(
        self, path: Path, *, resume_at: int | None = None, resume_step: int | None = None
    ) -> None:
        """Open the file.

        Args:
            path: the file; made if missing.
            resume_at: length in bytes when the checkpoint that the run continues from was written;
                what came later is cut.
            resume_step: the step of that checkpoint: where the file is shorter than ``resume_at``
                (somebody edited it), records after this step are dropped instead.
        """
        self.path = path
        self._file: BinaryIO = path.open("a+b", buffering=0)
        if resume_at is not None:
            self._cut(resume_at, resume_step or 0)
        else:
            self._cut_torn_line()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record.

        Raises:
            ArbError: the disk is full.
        """
        line = to_line(record)
        try:
            written = self._file.write(line)
        except OSError as error:
            raise ArbError(
                f"{self.path}: cannot be written: {error}",
                "Free some space, then continue with --resume.",
            ) from error
        if written != len(line):
            raise ArbError(
                f"{self.path}: the disk is full", "Free some space, then continue with --resume."
            )

    def sync(self) -> int:
        """Make everything written so far durable and return the length of the file in bytes."""
        os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _cut(self, length: int, step: int) -> None:
        size = self._file.seek(0, os.SEEK_END)
        if size >= length and (length == 0 or self._byte(length - 1) == b"\n"):
            self._file.truncate(length)
            return
        kept = b"".join(
            to_line(record) for record in read_metrics(self.path) if record.get("step", 0) <= step
        )
        self._file.truncate(0)
        self._file.write(kept)

    def _cut_torn_line(self) -> None:
        size = self._file.seek(0, os.SEEK_END)
        while size and self._byte(size - 1) != b"\n":
            size -= 1
        self._file.truncate(size)

    def _byte(self, position: int) -> bytes:
        self._file.seek(position)
        return self._file.read(1)


class NoMetrics:
    """The metrics of a rank that writes none."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Rank 0 writes it."""

    def sync(self) -> int:
        """Rank 0 knows the length of the file."""
        return 0


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line that a kill tore is left out.

    Raises:
        ArbError: the file is missing, or a line before the last is not a JSON object.
    """
    if not path.exists():
        raise ArbError(f"{path}: there is no such file", "A run directory of `arb train` has one.")
    lines = path.read_bytes().split(b"\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ArbError(f"{path}:{number}: not a JSON object: {error}") from error
        if not isinstance(record, dict):
            raise ArbError(f"{path}:{number}: not a JSON object")
        records.append(record)
    return records
