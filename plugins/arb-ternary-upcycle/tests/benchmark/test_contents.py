"""Contents of a report, from the files of a run and of earlier runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.errors import ArbError
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.report_page.page import write_page
from arb_ternary_upcycle.report.contents import gather
from arb_ternary_upcycle.report.sections import contribute
from arb_ternary_upcycle.report.writing import refresh_report, write_report
from arb_ternary_upcycle.store import Store


def make(path: Path, records: Sequence[Mapping[str, Any]], init_from: Path | None = None) -> Path:
    record = {
        "name": path.name,
        "backend": {"name": "torch"},
        "data": {"name": "text", "fingerprint": None},
        "threads": {"loops": {}, "last": None},
        "vocabulary_size": 256,
        "versions": {"arb-ternary-core": "0.1", "torch": "2"},
        "init_from": None if init_from is None else str(init_from),
    }
    RunDirectory(path).create("name: x\n", record, {})
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in records))
    return path


def step(number: int, phase: str, loss: Any, event: str = "train") -> dict[str, Any]:
    return {"event": event, "step": number, "phase": phase, "loss": loss}


@pytest.fixture
def first(tmp_path: Path) -> Path:
    block = {
        "event": "block",
        "block": 0,
        "steps": 2,
        "l1_first": 2.0,
        "l1": 1.0,
        "reason": "converged",
    }
    run = make(tmp_path / "first", [step(1, "blockwise", 2.0), step(2, "blockwise", "nan"), block])
    (run / "stages").mkdir()
    linears = [
        {
            "name": "blocks.0.attention.query",
            "calibration": 0.1,
            "held_out": 0.2,
            "rounding": 0.3,
            "zeros": 0.4,
        }
    ]
    report = {"medians": {"held_out_error": 0.2}, "linears": linears}
    (run / "stages" / "projection.json").write_text(json.dumps(report))
    return run


def test_report_includes_earlier_runs(first: Path, tmp_path: Path) -> None:
    records = [step(1, "global", 3.0), step(1, "global", 2.5, "validation"), step(2, "global", 2.0)]
    second = make(tmp_path / "second", [*records, step(2, "", 9.0, "validation")], first)
    contents = gather(second)
    assert [curve.name for curve in contents.curves] == ["second", "first"]
    assert contents.curves[1].train == [(1, 2.0)]  # a loss that is not a number is not a point
    assert contents.curves[0].train == [(1, 3.0), (2, 2.0)]
    assert contents.curves[0].validation == [(1, 2.5), (2, 9.0)]
    projection = contents.table("projection")
    blocks = contents.table("blockwise")
    assert projection is not None
    assert projection.to_json()[0]["held_out"] == 0.2
    assert blocks is not None
    assert blocks.to_json()[0]["reason"] == "converged"
    assert contents.projection == {"held_out_error": 0.2}
    assert contents.to_json()["projection_medians"] == {"held_out_error": 0.2}


def test_refresh_rewrites_an_existing_report_only(first: Path) -> None:
    refresh_report(first)
    assert not (first / "report").exists()
    Store(first / "report" / "measurements", {"step": 2})
    refresh_report(first)
    assert "2 steps" in (first / "report" / "report.html").read_text()


def test_results_of_tasks_are_a_table(first: Path) -> None:
    record = {
        "step": 2,
        "lm_eval": "0.4.13",
        "limit": None,
        "apply_chat_template": False,
        "samples": 20,
        "num_fewshot": 5,
        "metrics": {"acc,none": 0.25, "acc_stderr,none": 0.1, "nats_per_token": 1.5},
    }
    (first / "tasks.json").write_text(json.dumps({"quiz": record}))
    Store(first / "report" / "measurements", {"step": 2})
    refresh_report(first)
    shared = {"task": "quiz", "samples": 20, "examples": 5, "step": 2}
    assert json.loads((first / "report" / "report.json").read_text())["tasks"] == [
        {**shared, "metric": "acc", "value": 0.25, "stderr": 0.1},
        {**shared, "metric": "nats per token", "value": 1.5, "stderr": None},
    ]
    assert (first / "report" / "tasks.csv").read_text().splitlines()[1] == (
        "quiz,20,5,acc,0.25,0.1,2"
    )
    page = (first / "report" / "report.html").read_text()
    assert page.count("<h2>Tasks</h2>") == 1
    assert re.search(r"<td>0.25</td>\s*<td>0.1</td>", page)


def test_report_of_any_run_has_the_sections_of_upcycling(first: Path, tmp_path: Path) -> None:
    write_page([first], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<h2>Projection to ternary weights</h2>" in page
    assert "<h2>Block by block</h2>" in page
    assert "Training before this run" not in page
    second = make(tmp_path / "second", [step(1, "global", 3.0)], first)
    write_page([second], tmp_path / "page.html")
    assert "started from: first." in (tmp_path / "page.html").read_text()
    plain = make(tmp_path / "plain", [])
    assert contribute(RunDirectory(plain)) is None
    write_page([plain, first], tmp_path / "page.html")
    assert "<h2>first: Block by block</h2>" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    "file", ["report/measurements/plan.json", "verify/compare.json", "stages/projection.json"]
)
def test_damaged_file_is_named(first: Path, file: str) -> None:
    (first / file).parent.mkdir(parents=True, exist_ok=True)
    (first / file).write_text("{")
    with pytest.raises(ArbError, match=f"{Path(file).name}: cannot be read"):
        gather(first)


def test_unwritable_report_is_an_error(first: Path) -> None:
    (first / "report").write_text("in the way")
    with pytest.raises(ArbError, match="cannot be written"):
        write_report(first)
