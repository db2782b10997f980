"""A vision transformer with parts that are frozen by pattern."""

from __future__ import annotations

from pathlib import Path

import torch

from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary_train.build import build_parts
from arb_ternary_train.checkpoint import CheckpointStore, read_checkpoint
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train


def test_frozen_blocks_keep_their_bits(tmp_path: Path) -> None:
    path = tmp_path / "frozen.yaml"
    phase = {
        "name": "standard",
        "steps": 3,
        "batch_size": 16,
        "eval_every": 0,
        "freeze": ["embedding", "blocks.*"],
    }
    path.write_text(
        dump_yaml(
            {
                "name": "frozen",
                "backend": "torch",
                "data": {"name": "digits"},
                "masking": {"name": "labels"},
                "model": {
                    "name": "vit",
                    "width": 16,
                    "layers": 2,
                    "heads": 2,
                    "patch_size": 4,
                    "group_size": 32,
                },
                "optimizer": {"name": "sign_votes", "accum_threshold": 1},
                "checkpoint": {"every": 3, "keep": 1},
                "phases": [phase],
            }
        )
    )
    config = load_config(path).config
    before = build_parts(config, backend="torch").model.state_dict()
    train(config, RunRequest(directory=tmp_path / "run", backend="torch", reporter=Silent))
    after = read_checkpoint(CheckpointStore(tmp_path / "run" / "checkpoints").latest()).model
    weights = [name for name in before if name.endswith(".weight")]
    changed = {name for name in weights if not torch.equal(before[name], after[name])}
    assert changed == {"head.weight"}
    assert {
        "embedding.patches.linear.weight",
        "embedding.places.weight",
        "blocks.1.feed_forward.up.weight",
    } < {*weights}
