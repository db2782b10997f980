"""A step that an optimizer refuses leaves the same bytes on several ranks as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from arb_ternary_train.loading import load_config
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.metrics import read_metrics
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_train.world import SingleProcess, World
from arb_test_support.ranks import on_ranks

CONFIG = """
name: refused
threads: 1
deterministic: true
data: {name: text, path: TEXT, tokenizer: characters}
model: {name: decoder, width: 16, layers: 1, heads: 2, max_length: 8, group_size: 32,
    float_parts: [norms]}
optimizer:
  {name: split, ternary: {name: sign_votes, accum_threshold: 2}, float: {name: adagc,
      inner: {name: adamw}}}
checkpoint: {every: 1, keep: 9}
phases:
  - {name: standard, steps: 4, batch_size: 2, block_size: 8, eval_every: 0,
      gradient_accumulation_steps: 3}
"""
#: Micro-batches whose gradients are not finite, though their losses are: one of each rank.
BROKEN = (5, 7)
judged = TrainingLoop.loss


def broken(self: TrainingLoop, batch: Any, masked: Any, output: Tensor) -> Tensor:
    if self.microbatches in BROKEN:
        output.register_hook(lambda gradient: gradient * float("inf"))
    return judged(self, batch, masked, output)


def trained(world: World, folder: str, name: str) -> None:
    TrainingLoop.loss = broken  # type: ignore[method-assign]
    try:
        config = load_config(Path(folder, "run.yaml")).config
        train(config, RunRequest(directory=Path(folder, name), reporter=Silent, world=world))
    finally:
        TrainingLoop.loss = judged  # type: ignore[method-assign]


@pytest.mark.slow
def test_ranks_refuse_the_steps_that_one_process_refuses(tmp_path: Path, same_files: Any) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question; " * 20)
    (tmp_path / "run.yaml").write_text(CONFIG.replace("TEXT", str(tmp_path / "text.txt")))
    trained(SingleProcess(), str(tmp_path), "one")
    on_ranks(2, trained, str(tmp_path), "two")
    same_files(tmp_path / "one", tmp_path / "two")
    lines = read_metrics(tmp_path / "two/metrics.jsonl")
    assert [line["event"] for line in lines] == ["train", "skip", "skip", "train", "train", "train"]
    assert [line["micro_batch"] for line in lines if line["event"] == "skip"] == [6, 9]
