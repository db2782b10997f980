"""The exporter ``merged`` on the command line: a run with both sets of adapters is exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors
import torch

from arb_ternary.cli.main import main
from arb_ternary.errors import UsageProblem
from arb_ternary_progressive import Rack
from arb_ternary_progressive.exporter import build
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.restore import load_run

CONFIG = """
name: grown
data: {name: text, path: text.txt}
model: {name: decoder, width: 16, layers: 1, heads: 2, max_length: 8, group_size: 32,
    activations: float}
optimizer: {name: split, ternary: {name: sign_votes, accum_threshold: 2}, float: {name: adamw,
    lr: 0.01}}
phases:
  - {name: progressive, target_stacks: 2, steps_per_stack: 3, batch_size: 2, block_size: 8,
      trunk_strategy: qlora,
     qlora_enabled: true, qlora_rank: 2, progressive_qlora: true, progressive_qlora_rank: 1}
"""


def test_adapters_are_merged_in_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be or not to be, that is the question. " * 40)
    Path("grown.yaml").write_text(CONFIG)
    assert main(["train", "grown.yaml", "--run-dir", "run"]) == 0
    assert main(["export", "run", "merged.safetensors", "--format", "merged"]) == 0
    trained = load_run(Path("run")).model
    assert isinstance(trained, Rack)
    assert set(trained.ordered_stacks[0].adapters) == {"stack", "progressive"}
    assert any(
        bool((adapter.dense_weight() != 0).any())
        for adapter in trained.ordered_stacks[0].adapter_modules()
    )
    with safetensors.safe_open("merged.safetensors", framework="pt") as file:
        names = list(file.keys())
        metadata = json.loads(file.metadata()["arb_ternary"])
        weight = file.get_tensor("blocks.0.blocks.0.attention.query.weight")
    assert not any("adapters" in name for name in names)
    assert [stack["adapters"] for stack in metadata["structure"]["stacks"]] == [[], []]
    expected = trained.merged().state_dict()["blocks.0.blocks.0.attention.query.weight"]
    assert torch.equal(weight, expected)
    assert weight.dtype == torch.float32


def test_a_model_that_is_not_a_rack_is_refused(tmp_path: Path) -> None:
    decoder = Decoder(DecoderConfig(width=16, heads=2, layers=1), 8)
    with pytest.raises(
        UsageProblem, match="must be a rack, whose adapters are merged, not a Decoder"
    ):
        build(None).export(decoder, tmp_path / "file.safetensors", {})
