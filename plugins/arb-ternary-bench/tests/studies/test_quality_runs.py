"""The study of quality with real runs: the direction of its results, and a study that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arb_ternary_bench.quality.trials import STEP_TOKENS

COMMAND = [sys.executable, "-m", "arb_ternary_bench.study", "quality"]
COMMAND += ["-o", "size=tiny", "-o", "seeds=1"]
# One thread for each run: with two, other tests that run at the same time would slow both.
COMMAND += ["-o", f"jobs={os.cpu_count()}"]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("ARB_")}


def bench(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Run the study; return what it prints as JSON, and its progress."""
    done = subprocess.run(
        [*COMMAND, "--out", str(folder), "--json", *options],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result, done.stderr


@pytest.mark.slow
def test_the_short_form_learns_and_counts(tmp_path: Path) -> None:
    options = ("-o", "rules=[float32, sign_votes_8]", "-o", f"tuning_tokens={4 * STEP_TOKENS}")
    result, _ = bench(tmp_path, *options)
    assert result == json.loads((tmp_path / "result.json").read_text())
    float32, votes = result["rules"]
    assert (float32["name"], votes["name"]) == ("float32", "sign_votes_8")
    for rule in result["rules"]:
        assert len(rule["tuning"]) == 4
        best = min(trial["loss"] for trial in rule["tuning"])
        assert rule["tuning"][rule["chosen"]]["loss"] == best
        assert rule["curves"][0][-1] == [result["tokens"], rule["validation_losses"][0]]
        # After 32 steps: far below the 5.5 nats of guessing.
        assert rule["validation_loss_mean"] < 4.0
    assert float32["validation_loss_mean"] < result["unigram_entropy"]
    assert float32["validation_loss_mean"] < votes["validation_loss_mean"]
    # Per matrix, AdamW has a counter of 4 bytes; a row of votes has exponents, a matrix control
    # words.
    assert 96 <= float32["state_bits_per_linear_weight"] < 96.1
    assert 10 < votes["state_bits_per_linear_weight"] < 12
    assert votes["stored_gradient_bytes"] == 0
    assert (
        float32["stored_gradient_bytes"]
        == 4 * float32["linear_weights"]
        == 4 * votes["linear_weights"]
    )
    assert "| float32 |" in (tmp_path / "table.md").read_text()
    for name in ("loss.png", "frontier.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux"),
    reason="only Linux tells a process that its parent has died",
)
def test_study_resumes_inside_a_run_after_stop_and_kill(
    tmp_path: Path,
) -> None:
    options = ["-o", "rules=[sign_votes_8]"]
    options += ["-o", f"tokens={20 * STEP_TOKENS}", "-o", f"tuning_tokens={20 * STEP_TOKENS}"]
    folder = tmp_path / "study"
    trials = folder / "trials"
    runs = folder / "runs"

    stopped, code = end_in_the_middle(folder, options, signal.SIGTERM)
    assert code == 130
    assert "stopped by SIGTERM after step" in (runs / f"{stopped}.log").read_text()

    killed, code = end_in_the_middle(folder, options, signal.SIGKILL)
    assert code == -signal.SIGKILL
    finished = {path: path.stat().st_mtime_ns for path in trials.glob("*.json")}

    result, said = bench(folder, *options)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert said.count(": loss ") == 5 - len(finished)
    assert "continuing from step-" in (runs / f"{killed}.log").read_text()

    config = folder / "configs" / f"{killed}.yaml"
    whole = subprocess.run(
        [
            sys.executable,
            "-m",
            "arb_ternary.cli.main",
            "train",
            str(config),
            "--run-dir",
            str(tmp_path / "whole"),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**environment(), "OMP_NUM_THREADS": str(result["threads"])},
    )
    assert whole.returncode == 0, whole.stderr
    uninterrupted = json.loads((tmp_path / "whole" / "result.json").read_text())
    assert (
        json.loads((trials / f"{killed}.json").read_text())["loss"]
        == uninterrupted["validation_loss"]
    )


def end_in_the_middle(folder: Path, options: list[str], number: signal.Signals) -> tuple[str, int]:
    """Start the study, send it a signal while a run is between two steps; that run, and the study's
    exit code.
    """
    done = len(list(folder.glob("trials/*.json")))
    study = subprocess.Popen(
        [*COMMAND, "--out", str(folder), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    wait_until(lambda: len(list(folder.glob("trials/*.json"))) > done and bool(under_way(folder)))
    running = under_way(folder)[0]
    study.send_signal(number)
    return running, study.wait()


def under_way(folder: Path) -> list[str]:
    """Runs that have taken a few of their 20 steps."""
    steps: dict[str, int] = {}
    for path in folder.glob("runs/*/checkpoints/step-*"):
        name = path.parents[1].name
        step = int(path.name.rpartition("-")[2])
        steps[name] = max(step, steps.get(name, 0))
    return [name for name, step in steps.items() if step <= 12]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
