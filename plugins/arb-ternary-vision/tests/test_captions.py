"""The data source and masking of texts about images, and runs that write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from PIL import Image

from arb_ternary.cli.main import main
from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.errors import ArbError
from arb_ternary.protocols.data import Batch, BatchRequest, DataSource, MaskContext
from arb_ternary_testing.interruption import Crash, interruption
from arb_ternary_train.checkpoint import CheckpointStore, read_checkpoint
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.protocols import Scores, SizedSamples
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_vision.masking.captions import CaptionMasking
from arb_ternary_vision.masking.config import Augmentation, LabelsConfig

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
RUN: dict[str, Any] = {
    "name": "captions",
    "data": {"name": "captioned", "captions": NAMES},
    "masking": {"name": "captions"},
    "model": {
        "name": "captioner",
        "width": 16,
        "layers": 1,
        "image_layers": 1,
        "heads": 2,
        "patch_size": 4,
        "max_length": 8,
        "group_size": 32,
    },
    "optimizer": {"name": "scaled_votes", "lr": 0.1},
    "phases": [{"name": "standard", "steps": 4, "batch_size": 8, "eval_every": 0}],
    "checks": ["pure"],
    "checkpoint": {"every": 2, "keep": 9},
}


def config_of(folder: Path, **data: Any) -> Any:
    path = folder / "captions.yaml"
    path.write_text(dump_yaml({**RUN, "data": {**RUN["data"], **data}}))
    return load_config(path).config


def trained(folder: Path, name: str, *trackers: Any, resume: str | None = None) -> RunDirectory:
    config = attrs.evolve(config_of(folder), trackers=trackers)
    train(config, RunRequest(directory=folder / name, resume=resume, reporter=Silent))
    return RunDirectory.existing(folder / name)


def test_images_have_the_text_of_their_class(tmp_path: Path) -> None:
    source = config_of(tmp_path).data.build()
    assert isinstance(source, DataSource)
    assert isinstance(source, SizedSamples)
    batch = next(source.batches(BatchRequest(32, 1, 0)))
    assert batch.extras["captions"].shape == (32, source.predictions_per_sample + 1) == (32, 7)
    for label, ids in zip(
        batch.extras["labels"].tolist(), batch.extras["captions"].tolist(), strict=True
    ):
        assert source.tokenizer.decode(ids) == f"\n{NAMES[label]}".ljust(7, "\n")
    assert source.tokenizer.alphabet == "".join(sorted(set("".join(NAMES) + "\n")))
    assert source.attachments()["captions"] == NAMES
    assert (
        source.fingerprint()
        != config_of(tmp_path, captions=[*NAMES[:9], "neuf"]).data.build().fingerprint()
    )
    named = config_of(tmp_path, captions=None).data.build()
    assert named.captions == tuple("0123456789")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"captions": NAMES[:9]}, "9 texts, and 'digits' has 10 classes"),
        ({"captions": [*NAMES[:9], "ni\nne"]}, "has a line break"),
        ({"images": {"name": "shakespeare"}}, "'shakespeare' has no labelled images"),
    ],
)
def test_source_refuses_texts_that_do_not_fit(
    data: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ArbError, match=message):
        config_of(tmp_path, **data).data.build()


def test_masking_counts_a_text_up_to_its_end() -> None:
    images = torch.rand(2, 1, 8, 8)
    ids = torch.tensor([[0, 3, 4, 0, 0], [0, 1, 2, 3, 0]])
    batch = Batch(images, torch.arange(2), {"captions": ids})
    strategy = CaptionMasking(LabelsConfig())
    assert isinstance(strategy, Scores)
    masked = strategy.apply(
        batch, torch.Generator(), MaskContext(step=0, seed=0, vocabulary_size=5)
    )
    assert masked.inputs.tolist() == [[0, 3, 4, 0], [0, 1, 2, 3]]
    assert masked.targets.tolist() == [[3, 4, 0, 0], [1, 2, 3, 0]]
    assert masked.loss_mask.tolist() == [[True, True, True, False], [True] * 4]
    assert torch.equal(masked.arguments["images"], images)
    output = torch.nn.functional.one_hot(torch.tensor([[3, 4, 1, 2], [1, 2, 3, 0]]), 5).float()
    assert strategy.scores(output, masked)["accuracy"].tolist() == [1, 1, 0, 0, 1, 1, 1, 1]
    shifting = CaptionMasking(LabelsConfig(augment=[Augmentation(name="shift", amount=0.3)]))
    context = MaskContext(step=0, seed=0, vocabulary_size=5, training=True)
    moved = shifting.apply(batch, torch.Generator(), context).arguments["images"]
    assert not torch.equal(moved, images)
    with pytest.raises(ArbError, match="batches of this data have no captions"):
        strategy.apply(Batch(images, torch.arange(2)), torch.Generator(), context)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return trained(tmp_path_factory.mktemp("captions"), "run")


def test_resume_after_kill_is_bitwise(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(Crash):
        trained(tmp_path, "killed", interruption(3, "crash"))
    resumed = trained(tmp_path, "killed", resume="auto")
    expected = read_checkpoint(CheckpointStore(run.checkpoints).latest()).model
    found = read_checkpoint(CheckpointStore(resumed.checkpoints).latest()).model
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_held_out_images_get_texts(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = tmp_path / "sheet.png"
    options = ["generate", str(run.path), "--count", "6", "--output", str(sheet)]
    assert main(options) == 0
    output = capsys.readouterr().out
    assert output.count("\n") >= 6
    assert "of 6 texts are exact" in output
    assert sheet.stat().st_size
    assert main(options) == 0
    assert capsys.readouterr().out == output
    assert main(["generate", str(run.path), "--invert"]) == 2
    assert "--invert" in capsys.readouterr().err


def test_files_get_texts(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "black.png"
    Image.fromarray(np.zeros((16, 16), dtype=np.uint8)).save(file)
    assert main(["generate", str(run.path), str(file)]) == 0
    assert "black.png" in capsys.readouterr().out
