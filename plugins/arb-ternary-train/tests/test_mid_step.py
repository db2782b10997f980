"""A run that is stopped within a step resumes bitwise."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.cli.main import main
from arb_ternary_train.loop import TrainingLoop

CONFIG = """
name: accumulated
data: {name: text, path: text.txt}
model: {name: decoder, width: 16, layers: 1, heads: 2, max_length: 8, group_size: 32,
    float_parts: [head, norms]}
optimizer: {name: split, ternary: {name: OPTIMIZER}, float: {name: adamw}}
checkpoint: {every: 1000, keep: 2}
phases:
  - {name: standard, steps: 5, batch_size: 2, block_size: 8, eval_every: 0,
      gradient_accumulation_steps: 3}
"""


@pytest.mark.parametrize("optimizer", ["sign_votes", "scaled_votes"])
def test_run_stopped_within_a_step_resumes_bitwise(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be or not to be, that is the question. " * 40)
    Path("run.yaml").write_text(CONFIG.replace("OPTIMIZER", optimizer))
    assert main(["train", "run.yaml", "--run-dir", "whole"]) == 0
    draws = []
    predict = TrainingLoop.predict

    def stopped(self: TrainingLoop, batch: Any, masked: Any) -> Any:
        draws.append(batch)
        if len(draws) == 8:
            signal.raise_signal(signal.SIGTERM)
        return predict(self, batch, masked)

    monkeypatch.setattr(TrainingLoop, "predict", stopped)
    assert main(["train", "run.yaml", "--run-dir", "part"]) == 130
    assert main(["train", "run.yaml", "--run-dir", "part", "--resume"]) == 0
    assert Path("part/metrics.jsonl").read_bytes() == Path("whole/metrics.jsonl").read_bytes()
    ends = [next(Path(run, "checkpoints").glob("step-00000005*")) for run in ("part", "whole")]
    for file in ("model.safetensors", "state.safetensors", "state.json"):
        assert (ends[0] / file).read_bytes() == (ends[1] / file).read_bytes()
