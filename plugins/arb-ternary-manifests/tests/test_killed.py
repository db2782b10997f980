"""``arb run`` killed in the second run of a manifest: resumed, it ends with the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

MANIFEST = """version: 2
name: study
targets:
  - name: one
    system:
      ref: system.language_model
      config: {model: {width: 16, layers: 1, heads: 2, max_length: 8, float_parts: [norms]}}
    config: {data: {name: text, path: text.txt}, checkpoint: {every: 10}}
    runs:
      - {id: a, steps: 12, train: {batch_size: 2, block_size: 8, lr: 0.01}}
      - id: b
        steps: 60
        train: {batch_size: 2, block_size: 8, lr: 0.01}
        verify: {type: validation_loss, max: 50}
"""


def start(place: str) -> subprocess.Popen[bytes]:
    words = ["run", "study.yaml", "--run-dir", place, "--resume"]
    with Path(f"{place}.txt").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "arb_ternary.cli.main", *words],
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )


def finish(place: str) -> None:
    assert start(place).wait() == 0, Path(f"{place}.txt").read_text()


def contents(place: str) -> dict[str, Any]:
    """Return what both runs have written, without values of the clock."""
    found: dict[str, Any] = {}
    for run in (Path(place, "one", name) for name in "ab"):
        for file in [
            *run.glob("checkpoints/step-*/*"),
            run / "checkpoints/latest",
            run / "metrics.jsonl",
        ]:
            found[f"{run.name}/{file.relative_to(run)}"] = file.read_bytes()
        result = json.loads((run / "result.json").read_text())
        assert result.pop("tokens_per_second") >= 0
        found[f"{run.name}/result.json"] = result
    return found


@pytest.mark.slow
def test_manifest_killed_in_its_second_run_resumes_bitwise() -> None:
    Path("study.yaml").write_text(MANIFEST)
    finish("whole")
    process = start("cut")
    try:
        while not Path("cut/one/b/checkpoints/step-00000020").is_dir():
            assert process.poll() is None, Path("cut.txt").read_text()
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert Path("cut/one/a/result.json").exists()
    assert not Path("cut/one/b/result.json").exists()
    before = Path("cut/one/a/result.json").read_bytes()
    finish("cut")
    assert Path("cut/one/a/result.json").read_bytes() == before
    whole = contents("whole")
    cut = contents("cut")
    assert any(name.startswith("b/checkpoints/step-00000060/") for name in whole)
    assert cut == whole
