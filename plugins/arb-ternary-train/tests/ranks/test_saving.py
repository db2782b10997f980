"""Runs on two ranks beside the same in one process: lost micro-batches, and checkpoints that cannot be written."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from arb_ternary.errors import ArbError
from arb_ternary_train.checkpoint import no_fault
from arb_ternary_train.loading import load_config
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.progress import Silent
from arb_ternary_train.ranks.world import Alone, World
from arb_ternary_train.runner import RunRequest, train

CONFIG = """
name: saving
threads: 1
deterministic: true
data: {name: text, path: TEXT, tokenizer: characters}
model: {name: decoder, width: 16, layers: 1, heads: 2, max_length: 8, group_size: 32, float_parts: [norms]}
optimizer: {name: split, ternary: {name: sign_votes, accum_threshold: 2}, float: adamw}
checkpoint: {every: 2, keep: 9}
phases:
  - {name: standard, steps: 4, batch_size: 2, block_size: 8, eval_every: 0, gradient_accumulation_steps: 3,
     max_skipped: SKIPPED}
"""
#: Micro-batches without a finite loss: one of a step, all of a step, and one on each rank.
LOST = (2, 4, 5, 6, 11, 12)
#: Where the disk is full, and what has been made of the model by then.
FULL = {"temporary folder made": "nothing", "model written": "all of it", "manifest written": "all of it"}


def make(world: World, folder: Path, name: str, fault: str = "", skipped: int = 100) -> tuple[str, str]:
    """Train; the error that ended it."""

    def faults(point: str) -> None:
        if point == fault:
            raise OSError(errno.ENOSPC, "No space left on device")

    file = folder / f"{name}-{world.rank}.yaml"
    (folder / "text.txt").write_text("to be or not to be, that is the question; " * 20)
    file.write_text(CONFIG.replace("TEXT", str(folder / "text.txt")).replace("SKIPPED", str(skipped)))
    request = RunRequest(directory=folder / name, reporter=Silent, world=world, faults=faults if fault else no_fault)
    try:
        train(load_config(file).config, request)
    except ArbError as error:
        return error.what, error.hint
    return "", ""


def lossy(self: TrainingLoop, batch: Any, masked: Any, output: Tensor) -> Tensor:
    loss = judged(self, batch, masked, output)
    return loss * math.nan if self.micro_batches in LOST else loss


judged = TrainingLoop.loss


def on_rank(world: World, folder: Path) -> Any:
    TrainingLoop.loss = lossy  # type: ignore[method-assign]
    try:
        ends = [make(world, folder, "two"), make(world, folder, "diverged", skipped=2)]
    finally:
        TrainingLoop.loss = judged  # type: ignore[method-assign]
    full = {point: make(world, folder, point.replace(" ", "-"), point) for point in FULL}
    return ends, full


def test_lost_micro_batches_keep_their_places_on_ranks_too(two_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told, folder = two_ranks[0], two_ranks[1] / "test_saving"
    monkeypatch.setattr(TrainingLoop, "loss", lossy)
    wanted = [make(Alone(), folder, "one"), make(Alone(), folder, "given-up", skipped=2)]
    assert wanted[0] == ("", "")
    assert wanted[1][0] == "step 2: 2 micro-batches in a row had no finite loss; the last was nan"
    for each in told:
        assert each["test_saving"][0] == wanted
    for one, two in (("one", "two"), ("given-up", "diverged")):
        files = {path.relative_to(folder / one) for path in (folder / one).glob("checkpoints/*/*")}
        files.add(Path("metrics.jsonl"))
        different = [
            str(file) for file in files if (folder / one / file).read_bytes() != (folder / two / file).read_bytes()
        ]
        assert different == []
    metrics = (folder / "two/metrics.jsonl").read_text()
    assert [f'"micro_batch": {number},' in metrics for number in (1, *LOST)] == [False, *[True] * len(LOST)]


def test_a_full_disk_ends_all_ranks_with_the_same_error(two_ranks: Any) -> None:
    told, folder = two_ranks[0], two_ranks[1] / "test_saving"
    first, second = (each["test_saving"][1] for each in told)
    assert first == second
    for point, (what, hint) in first.items():
        store = folder / point.replace(" ", "-") / "checkpoints"
        assert what.startswith(f"{store}: the checkpoint of step 2 cannot be written")
        assert "No space left on device" in what
        assert "--resume" in hint
        assert list(store.iterdir()) == []
