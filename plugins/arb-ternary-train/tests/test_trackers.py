from __future__ import annotations

import csv
import errno
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.errors import ArbError, Interrupted
from arb_ternary_testing.file_faults import FileFaults
from arb_ternary_train.metrics import read_metrics
from arb_ternary_train.trackers import CsvConfig, build_csv


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_table_has_one_row_per_step(tiny: Any) -> None:
    run, _ = tiny.run("run", "trackers=[csv, {name: csv, path: deep/again.csv}]")
    table = rows(run.path / "metrics.csv")
    train = [record for record in read_metrics(run.metrics_file) if record["event"] == "train"]
    assert [float(row["loss"]) for row in table] == [record["loss"] for record in train]
    assert [int(row["step"]) for row in table] == list(range(1, 9))
    assert float(table[0]["tokens_per_second"]) > 0
    assert len(rows(run.path / "deep" / "again.csv")) == 8


def test_resumed_run_continues_the_table(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from arb_ternary_train.context import TrainingContext

    record_step = TrainingContext.record_step

    def stopping(self: TrainingContext, *arguments: Any, **options: Any) -> None:
        record_step(self, *arguments, **options)
        if self.step == 4:
            self.request_stop("a test")
        if self.step == 5:
            raise RuntimeError("killed")

    monkeypatch.setattr(TrainingContext, "record_step", stopping)
    with pytest.raises(Interrupted):
        tiny.run("run", "trackers=[csv]")
    with pytest.raises(RuntimeError):
        tiny.run("run", "trackers=[csv]", resume="auto")
    monkeypatch.undo()
    run, _ = tiny.run("run", "trackers=[csv]", resume="auto")
    assert [int(row["step"]) for row in rows(run.path / "metrics.csv")] == list(range(1, 9))


def test_tracker_outside_a_run_is_an_error(tiny: Any) -> None:
    with pytest.raises(ArbError, match="outside a run"):
        build_csv(CsvConfig()).arb_checkpoint_save(None, {})  # type: ignore[arg-type]
    with pytest.raises(ArbError, match="cannot be written"):
        tiny.run("run", "trackers=[{name: csv, path: run.json/metrics.csv}]")


def test_a_table_that_cannot_be_written_is_named(tmp_path: Path, tiny: Any) -> None:
    with FileFaults(tmp_path) as counted:
        tiny.run("whole", "trackers=[csv]")
    operations = [(kind, path.name) for kind, path in counted.operations]
    for kind in ("write", "create"):
        number = operations.index((kind, "metrics.csv"))
        run = f"no-{kind}"
        with (
            FileFaults(tmp_path, errno.ENOSPC, number),
            pytest.raises(ArbError, match=rf"{run}/metrics\.csv: .*No space left on device"),
        ):
            tiny.run(run, "trackers=[csv]")
