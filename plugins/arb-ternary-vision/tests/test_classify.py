"""Figures, the tracker ``confusion_matrix`` and the generator ``classify``."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from arb_ternary.backends.select import reset_backends
from arb_ternary.cli.main import main
from arb_ternary.errors import ArbError, Interrupted
from arb_ternary.protocols.data import Batch
from arb_ternary_testing.component import make_choice
from arb_ternary_train.context import TrainingContext
from arb_ternary_train.loading import load_config
from arb_ternary_train.plot import save_figure
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_vision.cli.images import read_images
from arb_ternary_vision.figures import draw_confusion, draw_sheet
from arb_ternary_vision.pixels import to_bytes
from arb_ternary_vision.predictions import Predictions, class_names, classify_batches

CONFIG = """
name: digits
seed: 1
data: digits
masking: {name: labels, augment: [{name: shift}]}
model: {name: convnet, width: 8, stages: 1, layers: 1, group_size: row}
optimizer: {name: scaled_votes, lr: 1.0}
checkpoint: {every: 3, keep: 3}
phases:
  - {name: standard, steps: 6, batch_size: 8, eval_every: 4, eval_batches: 2}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Train the same run twice, with the tracker and without it."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "digits.yaml").write_text(CONFIG)
    for name, more in (("without", ()), ("with", ("trackers=[confusion_matrix]",))):
        config = load_config(folder / "digits.yaml", more).config
        train(config, RunRequest(directory=folder / name, backend="torch", reporter=Silent))
    yield folder
    reset_backends()


def arb(*arguments):
    out = StringIO()
    err = StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(list(map(str, arguments)))
    reset_backends()
    return status, out.getvalue(), err.getvalue()


def width(path):
    with Image.open(path) as image:
        return image.size[0]


def test_tracker_draws_and_does_not_change_the_run(runs):
    assert width(runs / "with" / "confusion_matrix.png") > 300
    assert not list((runs / "with").glob(".*writing"))
    for step in (3, 6):
        for file in ("model.safetensors", "state.safetensors"):
            paths = [
                runs / name / "checkpoints" / f"step-{step:08}" / file
                for name in ("with", "without")
            ]
            assert paths[0].read_bytes() == paths[1].read_bytes()
    assert (runs / "with" / "metrics.jsonl").read_bytes() == (
        runs / "without" / "metrics.jsonl"
    ).read_bytes()


def test_resumed_run_with_tracker_is_bitwise(runs, tmp_path, monkeypatch):
    record_step = TrainingContext.record_step

    def stopping(self, *arguments, **options):
        record_step(self, *arguments, **options)
        if self.step == 2:
            self.request_stop("a test")

    config = load_config(runs / "digits.yaml", ("trackers=[confusion_matrix]",)).config
    monkeypatch.setattr(TrainingContext, "record_step", stopping)
    with pytest.raises(Interrupted):
        train(config, RunRequest(directory=tmp_path / "run", backend="torch", reporter=Silent))
    monkeypatch.undo()
    train(
        config,
        RunRequest(directory=tmp_path / "run", backend="torch", reporter=Silent, resume="auto"),
    )
    reset_backends()
    for file in ("checkpoints/step-00000006/model.safetensors", "metrics.jsonl"):
        assert (tmp_path / "run" / file).read_bytes() == (runs / "without" / file).read_bytes()


def test_last_figure_is_of_the_final_model(runs, tmp_path, monkeypatch):
    from arb_ternary_vision import figures

    drawn = []
    monkeypatch.setattr(
        figures, "draw_confusion", lambda *given: drawn.append(given) or draw_confusion(*given)
    )
    never = ("phases.0.eval_every=0", "phases.0.eval_batches=8")
    config = load_config(runs / "digits.yaml", ("trackers=[confusion_matrix]", *never)).config
    report = train(config, RunRequest(directory=tmp_path / "run", backend="torch", reporter=Silent))
    (counts, names, title), *more = drawn
    assert not more
    assert names == tuple("0123456789")
    assert counts.sum() == 359
    assert counts.sum(axis=1).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    assert title == f"step 6: {100 * np.trace(counts) / 359:.1f} % of 359 right"
    assert report.validation_metrics == {}
    monkeypatch.undo()
    evaluated = json.loads(arb("eval", tmp_path / "run", "--json")[1])
    assert evaluated["accuracy"] == pytest.approx(np.trace(counts) / 359)


def test_confusion_counts_true_and_predicted_classes():
    probabilities = np.eye(3, dtype=np.float32)[[0, 2, 2, 1]]
    found = Predictions(torch.zeros(4, 1, 1, 1), np.array([0, 1, 2, 1]), probabilities)
    assert found.confusion().tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
    assert found.correct.mean() == 0.75
    assert found.take(~found.correct).labels.tolist() == [1]


def test_classifying_refuses_other_predictions():
    masking = make_choice("masking", "labels").build()
    batch = Batch(torch.zeros(2, 1, 2, 2), torch.arange(2), {"labels": torch.tensor([0, 1])})
    wanted = {"vocabulary_size": 4, "seed": 0, "step": 0, "device": torch.device("cpu")}
    with pytest.raises(ArbError, match="must predict one class per sample"):
        classify_batches(nn.Identity(), [batch], masking, **wanted)
    with pytest.raises(ArbError, match="not one sample"):
        classify_batches(nn.Flatten(), [], masking, **wanted)
    model = nn.Flatten().train()
    assert (
        classify_batches(model, [batch], masking, **wanted).probabilities.tolist()
        == [[0.25] * 4] * 2
    )
    assert model.training


def test_attached_class_names_are_used_if_they_fit():
    assert class_names({"classes": ["a", "b"]}, 2) == ("a", "b")
    assert class_names({"classes": ["a", "b"]}, 3) == class_names({}, 3) == ("0", "1", "2")


@pytest.mark.parametrize("size", [1, 30])
def test_confusion_matrix_of_any_size(size, tmp_path):
    counts = np.random.default_rng(0).integers(0, 9, (size, size))
    counts[0] = 0  # a class without samples
    save_figure(
        draw_confusion(counts, [f"class {index}" for index in range(size)], "all"),
        tmp_path / "deep" / "m.png",
    )
    assert width(tmp_path / "deep" / "m.png") > 100


def test_failed_write_leaves_the_old_figure(tmp_path):
    figure = draw_sheet(
        np.zeros((3, 1, 2, 2), np.float32), ["a", "b", "c"], [True, False, None], "three"
    )
    save_figure(figure, tmp_path / "a.png")
    before = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.xyz").write_bytes(before)
    with pytest.raises(ArbError, match=r"a\.xyz: the figure cannot be written"):
        save_figure(figure, tmp_path / "a.xyz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.xyz"]
    assert (tmp_path / "a.xyz").read_bytes() == before


def test_pixels_become_bytes():
    grey = np.array([[[-1.0, 0.0, 1.0, 2.0]]], dtype=np.float32)
    assert to_bytes(grey).tolist() == [[0, 128, 255, 255]]
    colour = np.stack([grey[0], -grey[0], grey[0] * 0])
    assert to_bytes(colour)[0, 0].tolist() == [0, 255, 128]
    with pytest.raises(ArbError, match="2 channels cannot be drawn"):
        to_bytes(colour[:2])


def test_classify_held_out_images(runs, tmp_path):
    status, out, err = arb(
        "generate", runs / "with", "--count", 10, "--output", tmp_path / "sheet.png"
    )
    assert status == 0, err
    assert "of 10 held-out images are right" in out
    assert width(tmp_path / "sheet.png") > 300
    status, out, err = arb(
        "generate", runs / "with", "--wrong", "--count", 3, "--output", tmp_path / "wrong.png"
    )
    assert status == 0, err
    assert "of 359 held-out images are right" in out


def test_classify_files(runs, tmp_path):
    source = make_choice("data", "digits").build()
    image = source.validation.data[5, 0]
    names = []
    for name, pixels in (("light.png", image), ("dark.png", 16 - image)):
        # 255 levels instead of 16: within a half of one of them.
        Image.fromarray(np.rint(pixels * 255.0 / 16).astype(np.uint8)).save(tmp_path / name)
        names.append(tmp_path / name)
    results = [
        arb("generate", runs / "with", names[0]),
        arb("generate", runs / "with", names[1], "--invert"),
    ]
    assert [status for status, *_ in results] == [0, 0]
    first, second = (out.splitlines()[-1].split() for _, out, _ in results)
    assert first[1:] == second[1:]
    assert first[1] in "0123456789"


def test_files_to_classify_get_the_background_of_the_data(tmp_path):
    pixels = np.zeros((8, 8, 4), dtype=np.uint8)
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in (1, 2):
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{number}.png")
    images = {"name": "images", "path": str(tmp_path / "data"), "background": "#ff0000"}
    file = tmp_path / "data" / "a" / "1.png"
    for data, expected in (
        (images, [1.0, -1.0, -1.0]),
        ({"name": "captioned", "images": images}, [1.0, -1.0, -1.0]),
        ({"name": "digits"}, [1.0, 1.0, 1.0]),
    ):
        options = {key: value for key, value in data.items() if key != "name"}
        run = SimpleNamespace(
            config=SimpleNamespace(data=make_choice("data", data["name"], options)),
            directory=SimpleNamespace(attachments=lambda: {"image_shape": (3, 8, 8)}),
        )
        read = read_images(run, (file,), invert=False).data
        assert read[0, :, 0, 0].tolist() == expected


def test_classify_refuses_conflicting_options(runs, tmp_path):
    status, _, err = arb("generate", runs / "with", "--invert")
    assert status == 2
    assert "--invert: held-out images are already as in training" in err
    status, _, err = arb("generate", runs / "with", "--wrong", Path("x.png"))
    assert status == 2
    assert "the classes of the files are not known" in err
    status, _, err = arb("generate", runs / "with", tmp_path / "nowhere.png")
    assert status == 1
    assert "nowhere.png: the image cannot be read" in err
