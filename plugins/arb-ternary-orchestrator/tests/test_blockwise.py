"""Comparisons of strategies in the phase ``blockwise``, per block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary_orchestrator import branches
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder

pytest.importorskip("arb_ternary_upcycle")

MODEL = (
    "model={name: decoder, architecture: llama, width: 16, layers: 2, heads: 2, max_length: "
    "16, group_size: 32%s}"
)

#: Compares after step 8 of each block, up to step 12.
COMPARING = {
    "name": "orchestrator",
    "decision_interval": 8,
    "hysteresis": 8,
    "eval_horizon": 4,
    "strategies": ["configured", "wild", "wilder"],
    "safety_strategy": "wild",
    "max_overhead": 0.9,
}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("harmful")]


@pytest.fixture
def overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides for a run of ``blockwise`` in which the configured strategy always wins."""
    from arb_ternary_upcycle.float_model import (
        float_config,
        neutral_tensors,
        write_float_model,
    )

    monkeypatch.setattr(
        branches, "_is_better", lambda branch, *_: branch.trial.name == "configured"
    )
    torch.manual_seed(0)
    config = DecoderConfig(architecture="llama", width=16, layers=2, heads=2, max_length=16)
    teacher = Decoder(float_config(config), 256)
    tensors = [neutral_tensors(teacher)]
    write_float_model(tmp_path / "teacher", teacher.config, 256, {"kind": "bytes"}, tensors)
    return [
        f"data={{name: text, path: {tmp_path}/text.txt, tokenizer: bytes}}",
        MODEL % ", float_parts: [norms]",
        f"phases=[{{name: blockwise, teacher: {tmp_path}/teacher, steps: 24, batch_size: 2, "
        f"block_size: 8,"
        " eval_every: 0}]",
    ]


def test_losing_candidates_leave_no_trace_in_any_block(
    tiny: Any, equal: Any, overrides: list[str]
) -> None:
    plain = tiny.run("plain", *overrides)
    compared = tiny.run("compared", *overrides, f"phases.0.policy={json.dumps(COMPARING)}")
    assert [each["step"] for each in compared.decisions if each["candidates"]] == [8, 20, 32, 44]
    assert dict(compared.last.model).keys() == dict(plain.last.model).keys()
    equal(dict(compared.last.model), dict(plain.last.model))
    assert compared.steps == plain.steps
    lost = sum(each["steps_spent"] for each in compared.decisions)
    assert (
        json.loads(compared.directory.result_file.read_text())["phases"][0]["lost_steps"]
        == lost
        > 0
    )


def test_block_that_converges_in_a_branch_ends_with_it(
    tiny: Any, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from arb_ternary_upcycle.trend import Convergence

    monkeypatch.setattr(Convergence, "done", property(lambda self: self.trend.count >= 10))
    options = ["phases.0.convergence_target=0.001", "phases.0.convergence_patience=5"]
    run = tiny.run(
        "run", *overrides, *options, "phases.0.steps=48", f"phases.0.policy={json.dumps(COMPARING)}"
    )
    assert [record["steps"] for record in run.metrics if record["event"] == "block"] == [12, 12]
    assert [record["step"] for record in run.metrics if record["event"] == "train"] == list(
        range(1, 25)
    )
