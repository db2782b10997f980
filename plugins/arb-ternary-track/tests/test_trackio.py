"""Runs in trackio's database, read by its own interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arb_ternary import hookimpl
from arb_ternary_train import build
from arb_ternary_train.metrics import read_metrics

trackio = pytest.importorskip("trackio")

TRACKERS = "trackers=[{name: trackio, project: plays, layers_every: 4, wait: 60}]"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where trackio keeps its databases."""
    folder = tmp_path / "trackio"
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", folder)
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", folder)
    return folder


def check(run: Any) -> list[dict[str, Any]]:
    """Compare the one run of the project with the metrics file; return its rows."""
    (found,) = trackio.Api().runs("plays")
    assert found.name == run.path.name
    assert found.config["model"]["width"] == 16
    rows: list[dict[str, Any]] = trackio.SQLiteStorage.get_logs(
        "plays", found.name, run_id=found.id
    )
    for kind in ("train", "validation"):
        records = [r for r in read_metrics(run.metrics_file) if r["event"] == kind]
        assert records
        mine = [row for row in rows if f"{kind}/loss" in row]
        assert [row["step"] for row in mine] == [r["step"] for r in records]
        for row, record in zip(mine, records, strict=True):
            for name in {*record} - {"event", "step", "phase"}:
                assert row[f"{kind}/{name}"] == record[name]
    return rows


def test_a_run(tiny: Any, files_in: Any, home: Path) -> None:
    plain, _ = tiny.run("plain")
    run, report = tiny.run("run", TRACKERS)
    assert files_in(run.path) == files_in(plain.path)
    rows = check(run)
    assert [path.name for path in home.glob("*.db")] == ["plays.db"]
    layers = [row for row in rows if any(key.startswith("flips/") for key in row)]
    assert [row["step"] for row in layers] == [4, 8]
    counts = [v["values"] for k, v in layers[1].items() if k.startswith("accumulators/")]
    votes = next(row for row in report.audit.to_json()["rows"] if row["what"] == "votes")
    assert sum(map(sum, counts)) == votes["elements"]
    (last,) = [row["report"]["_value"] for row in rows if "report" in row]
    assert f"validation_loss: {report.validation_loss}" in last


def test_a_resumed_run_has_each_step_once(tiny: Any) -> None:
    tiny.crash("run", TRACKERS, step=7)
    run, _ = tiny.run("run", TRACKERS, resume=str(tiny.folder / "run/checkpoints/step-00000003"))
    check(run)


class Loss:
    """Takes the database away after a step."""

    def __init__(self, home: Path) -> None:
        self.home = home

    @hookimpl
    def arb_step_end(self, step: int) -> None:
        if step == 4:
            if self.home.exists():
                self.home.rename(self.home.with_name("away"))
            self.home.write_text("not a folder")


def test_a_database_that_is_lost_changes_nothing(
    tiny: Any, files_in: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = tiny.run("plain")

    def observe(config: Any) -> build.RunObservers:
        (tracker,) = config.trackers
        return build.RunObservers({"loss": Loss(home), "trackio": tracker.build()})

    monkeypatch.setattr(build, "build_observers", observe)
    monkeypatch.setattr("arb_ternary_track.delivery._PAUSE", 60)
    run, _ = tiny.run("run", TRACKERS)
    assert files_in(run.path) == files_in(plain.path)
    assert "points are not written: " in run.log_file.read_text()
