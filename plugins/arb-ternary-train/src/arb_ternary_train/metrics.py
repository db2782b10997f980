"""``metrics.jsonl``: one JSON object per line, one line per event, deterministic to the byte.

No line depends on the clock, so the file of a run that was killed and resumed equals the file of a
run that was not. A checkpoint stores the length of the file. A resume cuts the file there, which
also removes a line that a kill tore.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from arb_ternary.errors import ArbError
from arb_ternary_train.directory import (
    check_regular,
    open_file,
    reason_of,
    unwritable,
    write_line,
)


def to_line(record: Mapping[str, Any]) -> bytes:
    """Return one line of the file.

    JSON has no non-finite numbers: they become the strings ``nan``, ``inf`` and ``-inf``.
    """
    plain = {key: json_value(value) for key, value in record.items()}
    return (json.dumps(plain, allow_nan=False) + "\n").encode()


def json_value(value: Any) -> Any:
    """Return a value for JSON: non-finite numbers become text, and keys text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return value


class MetricsWriter:
    """Appends records to ``path``.

    Each line reaches the operating system in one write, before :meth:`write` returns.
    """

    def __init__(
        self, path: Path, *, resume_at: int | None = None, resume_step: int | None = None
    ) -> None:
        """Open the file.

        Args:
            path: the file; created if missing.
            resume_at: length in bytes when the checkpoint that the run continues from was written;
                what came later is cut.
            resume_step: the step of that checkpoint. If the file is shorter than ``resume_at``
                because somebody edited it, records after this step are dropped instead.

        Raises:
            ArbError: it is not a file, or the system refuses.
        """
        self.path = path
        self._file: IO[bytes] = open_file(path, "a+b", buffering=0)
        try:
            if resume_at is not None:
                self._cut(resume_at, resume_step or 0)
            else:
                self._cut_torn_line()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ArbError(f"{path}: cannot be cut: {reason_of(error)}") from error
            raise

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record.

        Raises:
            ArbError: the disk is full.
        """
        write_line(self._file, self.path, to_line(record))

    def sync(self) -> int:
        """Make everything written so far durable; return the length of the file in bytes.

        Raises:
            ArbError: the disk refuses.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise unwritable(self.path, error) from error
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
        """Cut the file to ``length`` bytes, or after ``step`` if that is not the end of a line."""
        size = self._file.seek(0, os.SEEK_END)
        if size >= length and (length == 0 or self._byte(length - 1) == b"\n"):
            self._file.truncate(length)
            return
        records = [each for each in read_metrics(self.path) if each.get("step", 0) <= step]
        self._file.truncate(0)
        self._file.write(b"".join(to_line(record) for record in records))

    def _cut_torn_line(self) -> None:
        """Cut what follows the last complete line."""
        size = self._file.seek(0, os.SEEK_END)
        while size and self._byte(size - 1) != b"\n":
            size -= 1
        self._file.truncate(size)

    def _byte(self, position: int) -> bytes:
        self._file.seek(position)
        return self._file.read(1)


class NoMetrics:
    """The metrics of ranks other than 0, which write none."""

    def write(self, record: Mapping[str, Any]) -> None:
        """No-op: rank 0 writes it."""

    def sync(self) -> int:
        """Return 0: rank 0 knows the length of the file."""
        return 0


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file; a last line that a kill tore is left out.

    Raises:
        ArbError: the file is missing, or a line before the last is not a JSON object.
    """
    check_regular(path)
    if not path.exists():
        raise ArbError(f"{path}: there is no such file", "A run directory of `arb train` has one.")
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ArbError(f"{path}: cannot be read: {reason_of(error)}") from error
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ArbError(f"{path}:{number}: not a JSON object: {error}") from error
        if not isinstance(record, dict):
            raise ArbError(f"{path}:{number}: not a JSON object")
        records.append(record)
    return records


def metric_names(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the numbers of steps and evaluations in records."""
    numbers: dict[str, None] = {}
    for record in records:
        if record.get("event") in ("train", "validation"):
            for key, value in record.items():
                if key != "step" and isinstance(value, int | float):
                    numbers.setdefault(key)
    return list(numbers)
