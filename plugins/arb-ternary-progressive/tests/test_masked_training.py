"""The strategies in runs of `arb train` with the phase ``standard``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arb_ternary.errors import DataError
from arb_ternary_train.loading import load_config
from arb_ternary_train.runner import RunRequest, train

CONFIG = """
name: masked
data: {data}
model:
  name: decoder
  width: 32
  layers: 1
  heads: 4
  max_length: 32
  causal: false
  float_parts: [embedding, head, norms, linears]
masking: {masking}
optimizer: {{name: adamw, lr: 0.02}}
phases: [{{name: standard, steps: {steps}, batch_size: 8, block_size: 32, eval_every: 1000}}]
"""
BYTES = "{name: text, path: text.txt}"
CHARACTERS = "{name: text, path: text.txt, tokenizer: characters}"


def run(folder: Path, data: str, masking: str, steps: int = 2) -> list[dict[str, object]]:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 30)
    config = folder / "config.yaml"
    config.write_text(
        CONFIG.format(
            data=data.replace("text.txt", str(folder / "text.txt")), masking=masking, steps=steps
        )
    )
    train(load_config(config).config, RunRequest(directory=folder / "run"))
    return [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize(
    "masking", ["mlm", "progressive", "{name: time_step, time_interpretation: input}"]
)
def test_a_run_with_the_strategy_learns(tmp_path: Path, masking: str) -> None:
    losses = [
        record["loss"]
        for record in run(tmp_path, BYTES, masking, steps=25)
        if record["event"] == "train"
    ]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_only_hidden_tokens_count(tmp_path: Path) -> None:
    first = run(tmp_path, BYTES, "mlm")[0]
    assert first["tokens"] == 8 * 4, "floor(32 * 0.15) of each of 8 rows"


def test_characters_need_their_own_mask_token(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match="is the mask token, and the data uses it"):
        run(tmp_path / "bare", CHARACTERS, "mlm")
    (tmp_path / "wrapped").mkdir()
    records = run(tmp_path / "wrapped", f"{{name: with_mask_token, source: {CHARACTERS}}}", "mlm")
    assert records[-1]["event"] == "validation"
