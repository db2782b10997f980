"""Event files, read by TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from arb_ternary_train.metrics import read_metrics

pytest.importorskip("tensorboard")

TRACKERS = "trackers=[{name: tensorboard, layers_every: 4, wait: 60}]"


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    return events.Reload()


def check(events: Any, run: Any) -> None:
    """Compare the scalars with the metrics file: TensorBoard holds float32."""
    for kind in ("train", "validation"):
        records = [r for r in read_metrics(run.metrics_file) if r["event"] == kind]
        assert records
        for name in {*records[0]} - {"event", "step", "phase"}:
            found = [(each.step, each.value) for each in events.Scalars(f"{kind}/{name}")]
            assert found == [(r["step"], float(np.float32(r[name]))) for r in records], name


def text(events: Any, name: str) -> Any:
    (event,) = events.Tensors(f"{name}/text_summary")
    return yaml.safe_load(event.tensor_proto.string_val[0].decode().strip("`").removeprefix("yaml"))


def test_a_run(tiny: Any, files_in: Any) -> None:
    plain, _ = tiny.run("plain")
    run, report = tiny.run("run", TRACKERS)
    assert files_in(run.path) == files_in(plain.path)
    events = read(run.path / "trackers/tensorboard")
    check(events, run)
    assert [event.step for event in events.Scalars("train/tokens_per_second")] == [*range(1, 9)]
    flips = {r["step"]: r["flips"] for r in read_metrics(run.metrics_file) if "flips" in r}
    names = [tag for tag in events.Tags()["scalars"] if tag.startswith("flips/")]
    for step in (4, 8):
        values = [e.value for name in names for e in events.Scalars(name) if e.step == step]
        assert len(values) == len(names) > 3
        assert sum(values) == flips[step]
    histograms = [tag for tag in events.Tags()["histograms"] if tag.startswith("accumulators/")]
    assert len(histograms) > 3
    total = 0
    for name in histograms:
        (first, last) = events.Histograms(name)
        assert (first.step, last.step) == (4, 8)
        assert sum(last.histogram_value.bucket) == last.histogram_value.num
        total += last.histogram_value.num
    votes = next(row for row in report.audit.to_json()["rows"] if row["what"] == "votes")
    assert total == votes["elements"]
    assert text(events, "config")["model"]["width"] == 16
    assert text(events, "report")["validation_loss"] == report.validation_loss


def test_a_resumed_run_has_each_step_once(tiny: Any) -> None:
    tiny.crash("run", TRACKERS, step=7)
    run, _ = tiny.run("run", TRACKERS, resume=str(tiny.folder / "run/checkpoints/step-00000003"))
    events = read(run.path / "trackers/tensorboard")
    check(events, run)
    assert [event.step for event in events.Scalars("train/tokens_per_second")] == [*range(1, 9)]
    assert text(events, "config")["seed"] == 3


def test_a_folder_that_cannot_be_written_changes_nothing(tiny: Any, files_in: Any) -> None:
    plain, _ = tiny.run("plain")
    run, _ = tiny.run("run", f"trackers=[{{name: tensorboard, folder: {tiny.file}, wait: 60}}]")
    assert files_in(run.path) == files_in(plain.path)
    assert "11 of 11 points are not written: " in run.log_file.read_text()
