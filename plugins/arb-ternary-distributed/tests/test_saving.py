"""Runs of two ranks and of one process: lost micro-batches, and checkpoints that fail."""

from __future__ import annotations

import errno
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arb_ternary.errors import ArbError, CheckpointError
from arb_ternary_distributed import saving
from arb_ternary_train.checkpoint import model_entries, no_fault, read_checkpoint
from arb_ternary_train.loading import load_config
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.progress import Silent
from arb_ternary_train.run_state import Checkpointer
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_train.world import SingleProcess, World
from arb_test_support.ranks import on_ranks

CONFIG = """
name: saving
threads: 1
deterministic: true
data: {name: text, path: TEXT, tokenizer: characters}
model: {name: decoder, width: 16, layers: 1, heads: 2, max_length: 8, group_size: 32,
    float_parts: [norms]}
optimizer: {name: split, ternary: {name: sign_votes, accum_threshold: 2}, float: adamw}
checkpoint: {every: 2, keep: 9}
phases:
  - {name: standard, steps: 4, batch_size: 2, block_size: 8, eval_every: 0,
      gradient_accumulation_steps: 3,
     max_skipped: SKIPPED}
"""
#: Micro-batches without a finite loss: one of a step, all of a step, and one on each rank.
LOST = (2, 4, 5, 6, 11, 12)
#: Where the disk is full.
FULL = ("temporary folder made", "model written", "manifest written")


def make(
    world: World,
    folder: Path,
    name: str,
    *overrides: str,
    fault: str = "",
    skipped: int = 100,
    resume: Any = None,
) -> tuple[str, str]:
    """Train, and return the error that ended the run."""

    def faults(point: str) -> None:
        if point == fault:
            raise OSError(errno.ENOSPC, "No space left on device")

    file = folder / f"{name}-{world.rank}.yaml"
    (folder / "text.txt").write_text("to be or not to be, that is the question; " * 20)
    file.write_text(
        CONFIG.replace("TEXT", str(folder / "text.txt")).replace("SKIPPED", str(skipped))
    )
    request = RunRequest(
        directory=folder / name,
        reporter=Silent,
        world=world,
        faults=faults if fault else no_fault,
        resume=resume,
    )
    try:
        train(load_config(file, overrides).config, request)
    except ArbError as error:
        return error.what, error.hint
    return "", ""


def lossy(self: TrainingLoop, batch: Any, masked: Any, output: Tensor) -> Tensor:
    loss = judged(self, batch, masked, output)
    return loss * math.nan if self.microbatches in LOST else loss


judged = TrainingLoop.loss


def on_rank(world: World, folder: Path) -> Any:
    TrainingLoop.loss = lossy  # type: ignore[method-assign]
    try:
        ends = [make(world, folder, "two"), make(world, folder, "diverged", skipped=2)]
        pieces = [make(world, folder, "pieces", PIECES)]
    finally:
        TrainingLoop.loss = judged  # type: ignore[method-assign]
    full = {point: make(world, folder, point.replace(" ", "-"), fault=point) for point in FULL}
    pieces.append(make(world, folder, "pieces-early", PIECES, fault="temporary folder made"))
    write_flushed = saving.fmt.write_flushed
    if world.rank == 1:
        saving.fmt.write_flushed = refused
    pieces.append(make(world, folder, "pieces-one", PIECES))
    saving.fmt.write_flushed = write_flushed
    return ends, full, pieces


PIECES = "ranks={checkpoints: pieces}"


def refused(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_lost_micro_batches_keep_their_index(
    two_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = two_ranks[0]
    folder = two_ranks[1] / "test_saving"
    monkeypatch.setattr(TrainingLoop, "loss", lossy)
    wanted = [
        make(SingleProcess(), folder, "one"),
        make(SingleProcess(), folder, "given-up", skipped=2),
    ]
    assert wanted[0] == ("", "")
    assert wanted[1][0] == "step 2: 2 micro-batches in a row had no finite loss; the last was nan"
    for each in reports:
        assert each["test_saving"][0] == wanted
    for one, two in (("one", "two"), ("given-up", "diverged")):
        files = {path.relative_to(folder / one) for path in (folder / one).glob("checkpoints/*/*")}
        files.add(Path("metrics.jsonl"))
        different = [
            str(file)
            for file in files
            if (folder / one / file).read_bytes() != (folder / two / file).read_bytes()
        ]
        assert different == []
    metrics = (folder / "two/metrics.jsonl").read_text()
    assert [f'"micro_batch": {number},' in metrics for number in (1, *LOST)] == [
        False,
        *[True] * len(LOST),
    ]


def marked(world: World) -> tuple[str, int]:
    """Save when only rank 0 has made progress, as after an evaluation by an observer."""
    written: list[Any] = []

    def save_model(*arguments: Any) -> str:
        written.append(arguments)
        return str(world.broadcast("new"))

    world.save_model = save_model  # type: ignore[method-assign]
    saver = Checkpointer(None, {})  # type: ignore[arg-type]
    saver.mark_saved(Path("old"))
    if world.is_main:
        saver.mark_progress()
    context: Any = SimpleNamespace(
        world=world,
        tell=lambda *_: None,
        phase=None,
        model=nn.Linear(1, 1),
        config=SimpleNamespace(ranks=None),
        structures=[],
        step=1,
        tokens=1,
        finished=[],
        evaluation_shape=None,
        unfinished_evaluation=None,
        device=world.device,
        logbook=SimpleNamespace(metrics=SimpleNamespace(sync=lambda: 0)),
    )
    return str(saver.save(context)), len(written)


def test_all_ranks_save_if_rank_0_has_made_progress() -> None:
    assert on_ranks(2, marked) == [("new", 1)] * 2


def test_a_full_disk_ends_all_ranks(two_ranks: Any) -> None:
    reports = two_ranks[0]
    folder = two_ranks[1] / "test_saving"
    first, second = (each["test_saving"][1] for each in reports)
    assert first == second
    for point, (what, hint) in first.items():
        store = folder / point.replace(" ", "-") / "checkpoints"
        assert what.startswith(f"{store}: the checkpoint of step 2 cannot be written")
        assert "No space left on device" in what
        assert "--resume" in hint
        assert list(store.iterdir()) == []


def test_pieces_are_the_whole_model(
    two_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = two_ranks[0]
    folder = two_ranks[1] / "test_saving"
    assert [each["test_saving"][2][0] for each in reports] == [("", "")] * 2
    pieces, whole = (folder / name / "checkpoints/step-00000004" for name in ("pieces", "two"))
    files = {path.name for path in pieces.iterdir()}
    assert {"model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"} < files
    assert "model.safetensors" not in files
    cut = read_checkpoint(pieces)
    one = read_checkpoint(whole)
    assert {*cut.model} == {*one.model}
    for name, tensor in one.model.items():
        assert torch.equal(cut.model[name], tensor)
        assert cut.model.outline(name).shape == tensor.shape  # type: ignore[attr-defined]
    for file in ("state.json", "state.safetensors"):
        assert (pieces / file).read_bytes() == (whole / file).read_bytes()
    listed = [
        {n: (e.dtype, e.shape, e.nbytes) for n, e in model_entries(path).items()}
        for path in (pieces, whole)
    ]
    assert listed[0] == listed[1]
    # One process continues from pieces, and ends with the bytes of a run without pieces.
    monkeypatch.setattr(TrainingLoop, "loss", lossy)
    shutil.copytree(folder / "pieces", folder / "resumed")
    second = folder / "resumed/checkpoints/step-00000002"
    assert make(SingleProcess(), folder, "resumed", resume=second) == ("", "")
    last = folder / "resumed/checkpoints/step-00000004"
    assert (last / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_failed_piece_ends_all_ranks_and_names_the_rank(two_ranks: Any) -> None:
    reports = two_ranks[0]
    folder = two_ranks[1] / "test_saving"
    (_, early, one), other = (each["test_saving"][2] for each in reports)
    assert other[1:] == [early, one]
    assert "No space left on device" in early[0]
    assert "rank 1: " in one[0]
    assert "rank 0: " not in one[0]
    assert "No space left on device" in one[0]
    assert "use a shared disk" in one[1]
    for name in ("pieces-early", "pieces-one"):
        assert list((folder / name / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("damage", ["missing", "altered"])
def test_a_damaged_piece_is_found(two_ranks: Any, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "step-00000002"
    shutil.copytree(two_ranks[1] / "test_saving/pieces/checkpoints/step-00000002", copy)
    piece = copy / "model-00001-of-00002.safetensors"
    if damage == "missing":
        piece.unlink()
    else:
        content = bytearray(piece.read_bytes())
        content[-1] ^= 1
        piece.write_bytes(content)
    with pytest.raises(CheckpointError, match="model-00001-of-00002"):
        read_checkpoint(copy)
