"""The tracker ``csv``: the metrics of every step as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from attrs import frozen

from arb_ternary import hookimpl
from arb_ternary.config.options import option
from arb_ternary.errors import ArbError
from arb_ternary.protocols.runs import RunContext
from arb_ternary_train.directory import unwritable, write_line


@frozen(kw_only=True)
class CsvConfig:
    """Options of the tracker ``csv``."""

    path: str = option("metrics.csv", "the file; relative to the run directory")


class CsvTracker:
    """Writes one row per step. The first step decides the columns; later numbers have none.

    A checkpoint stores the length of the file, so a resumed run continues it without a gap or a
    repetition.
    """

    def __init__(self, config: CsvConfig) -> None:
        self.config = config
        self._path = Path(config.path)
        self._file: BinaryIO | None = None
        self._columns: list[str] = []

    @hookimpl
    def arb_run_start(self, context: RunContext) -> None:
        path = context.directory / self.config.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            if context.step == 0:
                self._file.truncate(0)
        except OSError as error:
            raise unwritable(path, error) from error
        self._path = path

    @hookimpl
    def arb_step_end(self, context: RunContext, step: int, metrics: Mapping[str, Any]) -> None:
        if not self._columns:
            self._columns = list(metrics)
            self._write(self._columns)
        self._write([metrics.get(column, "") for column in self._columns])

    @hookimpl
    def arb_checkpoint_save(self, context: RunContext, state: dict[str, Any]) -> None:
        length = self._opened().seek(0, io.SEEK_END)
        state[f"csv {self.config.path}"] = {"length": length, "columns": list(self._columns)}

    @hookimpl
    def arb_checkpoint_load(self, context: RunContext, state: Mapping[str, Any]) -> None:
        mine = state.get(f"csv {self.config.path}", {"length": 0, "columns": []})
        self._columns = list(mine["columns"])
        file = self._opened()
        try:
            file.truncate(min(mine["length"], file.seek(0, io.SEEK_END)))
        except OSError as error:
            raise unwritable(self._path, error) from error

    @hookimpl
    def arb_run_end(self, context: RunContext, status: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, values: list[Any]) -> None:
        row = io.StringIO(newline="")
        csv.writer(row).writerow(values)
        write_line(self._opened(), self._path, row.getvalue().encode())

    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise ArbError("the csv tracker is used outside a run")
        return self._file


def build_csv(config: CsvConfig) -> CsvTracker:
    """Build the tracker ``csv``."""
    return CsvTracker(config)
