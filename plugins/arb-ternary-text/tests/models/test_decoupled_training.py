"""Runs of a decoder with decoupled attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.errors import ConfigError
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_train.safetensors_file import SafetensorsFile

MODEL: dict[str, Any] = {
    "name": "decoder",
    "width": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "max_length": 16,
    "group_size": 32,
    "attention": "decoupled",
    "sem_dim": 4,
    "geo_dim": 4,
    "rotary_dim": 8,
    "attention_gate": True,
    "null_key_value": True,
}
SPLIT = {"name": "split", "ternary": "scaled_votes", "float": {"name": "adamw", "lr": 0.02}}


def config(
    folder: Path, *, optimizer: Any = SPLIT, phase: dict[str, Any] | None = None, **model: Any
) -> Any:
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 30)
    steps = {
        "name": "standard",
        "steps": 8,
        "batch_size": 4,
        "block_size": 8,
        "eval_every": 0,
        **(phase or {}),
    }
    path = folder / "config.yaml"
    path.write_text(
        dump_yaml(
            {
                "name": "decoupled",
                "data": {"name": "text", "path": str(folder / "text.txt"), "tokenizer": "bytes"},
                "model": {**MODEL, **model},
                "optimizer": optimizer,
                "phases": [steps],
                "checkpoint": {"every": 4, "keep": 9},
            }
        )
    )
    return load_config(path).config


@pytest.mark.parametrize("streams", [False, True])
def test_resume_is_bitwise(tmp_path: Path, streams: bool) -> None:
    made = config(tmp_path, phase={"preserve_state": streams})
    train(made, RunRequest(directory=tmp_path / "run", backend="torch", reporter=Silent))
    first, last = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    whole = {
        name: (last / name).read_bytes()
        for name in ("model.safetensors", "state.safetensors", "state.json")
    }
    before, after = (SafetensorsFile(each / "model.safetensors") for each in (first, last))
    for name in ("gate", "null_key", "null_value", "query_semantic.votes", "key_geometric.votes"):
        learned = f"blocks.1.attention.{name}"
        assert not torch.equal(before[learned], after[learned]), name
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    train(made, RunRequest(resume=str(first), backend="torch", reporter=Silent))
    assert {name: (last / name).read_bytes() for name in whole} == whole


def test_a_vote_rule_alone_cannot_train_gates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float"):
        config(tmp_path, optimizer="scaled_votes")
