"""Runs in wandb's offline files, read by its own ``wandb leet inspect``."""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from arb_ternary import hookimpl
from arb_ternary.protocols.runs import RunContext
from arb_ternary_train import build
from arb_ternary_train.metrics import read_metrics

wandb = pytest.importorskip("wandb")
choose_mode = importlib.import_module("arb_ternary_track.wandb_writer").choose_mode

TRACKERS = "trackers=[{name: wandb, project: plays, layers_every: 4, wait: 120}]"


@pytest.fixture(autouse=True)
def service() -> Iterator[None]:
    """End wandb's process after the test: its address is in the environment."""
    yield
    processes = [each for each in gc.get_objects() if type(each) is subprocess.Popen]
    processes = [each for each in processes if "wandb" in str(each.args)]
    with suppress(ConnectionError):
        wandb.teardown()
    os.environ.pop("WANDB_SERVICE", None)
    # wandb itself does not wait for it, which would become a warning.
    for process in processes:
        process.wait(60)


def read(file: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return [json.loads(line) for line in output.stdout.splitlines()]


def check(run: Any, parts: int) -> list[dict[str, Any]]:
    """Compare the offline files of a run with the metrics file; return their rows."""
    files = sorted(run.path.glob("trackers/wandb/offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1
    assert len(files) == parts
    records = [record for file in files for record in read(file)]
    heads = [record["run"] for record in records if record["type"] == "run"]
    assert {(head["project"], head["display_name"]) for head in heads} == {("plays", "run")}
    assert len({head["run_id"] for head in heads}) == 1
    assert heads[0]["config"]["update"]["model"]["width"] == 16
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    for kind in ("train", "validation"):
        metrics = [r for r in read_metrics(run.metrics_file) if r["event"] == kind]
        mine = [row for row in rows if f"{kind}/loss" in row]
        assert [row["step"] for row in mine] == [r["step"] for r in metrics]
        for row, record in zip(mine, metrics, strict=True):
            for name in {*record} - {"event", "step", "phase"}:
                assert row[f"{kind}/{name}"] == record[name]
    return records


def test_a_run(tiny: Any, files_in: Any) -> None:
    plain, _ = tiny.run("plain")
    run, report = tiny.run("run", TRACKERS)
    assert files_in(run.path) == files_in(plain.path)
    records = check(run, parts=1)
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    layers = [row for row in rows if any(key.startswith("flips/") for key in row)]
    assert [row["step"] for row in layers] == [4, 8]
    kept = [k for k in layers[1] if k.startswith("accumulators/") and k.endswith(".values")]
    counts = [layers[1][key] for key in kept]
    votes = next(row for row in report.audit.to_json()["rows"] if row["what"] == "votes")
    assert sum(map(sum, counts)) == votes["elements"]
    summaries = [r["summary"]["update"] for r in records if r["type"] == "summary"]
    (last,) = [summary["report"] for summary in summaries if "report" in summary]
    assert last["validation_loss"] == report.validation_loss


def test_a_resumed_run_has_each_step_once(tiny: Any) -> None:
    tiny.crash("run", TRACKERS, step=7)
    run, _ = tiny.run("run", TRACKERS, resume=str(tiny.folder / "run/checkpoints/step-00000003"))
    check(run, parts=2)


def test_without_a_key_it_is_offline() -> None:
    assert choose_mode() == "offline"


@pytest.mark.parametrize(
    ("given", "mode"),
    [("disabled", "disabled"), ("online", "online"), ("dryrun", "offline"), ("run", "online")],
)
def test_the_mode_that_is_set_is_used(
    given: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", given)
    assert choose_mode() == mode


def test_an_unknown_mode_is_said_and_changes_nothing(
    tiny: Any, files_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = tiny.run("plain")
    monkeypatch.setenv("WANDB_MODE", "ofline")
    run, _ = tiny.run("run", TRACKERS)
    assert files_in(run.path) == files_in(plain.path)
    assert "WANDB_MODE: wandb has no mode 'ofline'" in run.log_file.read_text()


def children() -> list[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for file in lists for pid in file.read_text().split()]


class Loss:
    """Ends wandb's process after a step, once it has written something."""

    ended = 0

    @hookimpl
    def arb_step_end(self, context: RunContext, step: int) -> None:
        if step != 4:
            return
        progress = context.directory / "trackers/wandb plays.json"
        deadline = time.monotonic() + 100
        while '"train"' not in progress.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in children():
            if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                self.ended += 1


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_a_connection_that_is_lost_changes_nothing(
    tiny: Any, files_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = tiny.run("plain")
    loss = Loss()

    def observe(config: Any) -> build.RunObservers:
        (tracker,) = config.trackers
        return build.RunObservers({"loss": loss, "wandb": tracker.build()})

    monkeypatch.setattr(build, "build_observers", observe)
    run, _ = tiny.run("run", TRACKERS.replace("120", "5"))
    assert files_in(run.path) == files_in(plain.path)
    assert loss.ended == 1
    log = run.log_file.read_text()
    assert re.search(r"tracker wandb: \d+ of 13 points are not written: ", log)
