"""Runs on images: resume, the tracker ``sample_grid`` and the generator ``image_diffusion``."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from arb_ternary.errors import ArbError, UsageProblem
from arb_ternary_diffusion.images import cycle_labels, find_label, write_grid
from arb_ternary_train.cli.generate import generate
from arb_ternary_train.report_page.page import write_page
from arb_ternary_train.restore import load_run, measure

UNET = "model={name: unet, width: 8, layers: 1}"
MODELS = {
    "dit": (),
    "unet predicting x0": (UNET, "masking={name: noise, prediction: x0, schedule: linear}"),
}


@pytest.mark.parametrize("overrides", MODELS.values(), ids=MODELS)
def test_resumed_run_is_bitwise(images: Any, files_in: Any, overrides: tuple[str, ...]) -> None:
    run, report = images.run("run", *overrides)
    assert report.audit.pure
    assert report.tokens == 32
    assert report.baselines == {}, "the data's baselines are for classes"
    assert measure(load_run(run.path))[0].loss == report.validation_loss
    whole = files_in(run.path)
    shutil.rmtree(run.checkpoints / "step-00000004")
    images.run("run", *overrides, resume="auto")
    assert files_in(run.path) == whole


def test_sample_grid_does_not_change_the_run(images: Any, files_in: Any) -> None:
    tracker = "trackers=[{name: sample_grid, count: 10, steps: 2}]"
    plain, _ = images.run("plain")
    tracked, _ = images.run("tracked", tracker)
    assert files_in(tracked.path) == files_in(plain.path)
    grids = sorted((tracked.path / "samples").iterdir())
    assert [grid.name for grid in grids] == ["step-00000002.png", "step-00000004.png"]
    with Image.open(grids[0]) as image:
        assert image.size == (4 * 32 + 3 * 2, 3 * 32 + 2 * 2)  # ten in a square
    assert grids[0].read_bytes() != grids[1].read_bytes()
    page = tracked.path / "report.html"
    write_page([tracked.path], page)
    encoded = base64.b64encode(grids[1].read_bytes()).decode("ascii")
    assert f'src="data:image/png;base64,{encoded}"' in page.read_text(encoding="utf-8")
    again, _ = images.run("again", tracker)
    assert (again.path / "samples" / grids[1].name).read_bytes() == grids[1].read_bytes()


def test_sample_grid_refuses_a_classifier(images: Any) -> None:
    classifier = ("masking=labels", "model={name: vit, width: 16, layers: 1, heads: 2}")
    with pytest.raises(ArbError, match="its masking is 'labels', and images are drawn from"):
        images.run("run", *classifier, "trackers=[sample_grid]")


def drawn(run: Path, *arguments: str) -> Any:
    file = run.parent / "drawn.png"
    result = CliRunner().invoke(
        generate, [str(run), "--output", str(file), "--steps", "3", *arguments]
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    with Image.open(file) as image:
        return np.asarray(image)


def test_images_depend_on_seed_and_options(images: Any) -> None:
    run, _ = images.run("run", "phases.0.lr_schedule=constant", "phases.0.steps=12")
    first = drawn(run.path, "--count", "4", "--seed", "1")
    assert first.shape == (2 * 32 + 2, 2 * 32 + 2)
    assert np.array_equal(drawn(run.path, "--count", "4", "--seed", "1"), first)
    nine = drawn(run.path, "--count", "9", "--seed", "1")
    assert np.array_equal(nine[:32, :66], first[:32]), (
        "the first images do not depend on how many there are"
    )
    for changed in (
        ("--seed", "2"),
        ("--seed", "1", "--label", "7"),
        ("--seed", "1", "--sampler", "ddpm"),
        ("--seed", "1", "--eta", "0.5"),
        ("--seed", "1", "--guidance", "3"),
    ):
        assert not np.array_equal(drawn(run.path, "--count", "4", *changed), first), changed
    with pytest.raises(UsageProblem, match="no class '12'; classes are 0, 1, 2"):
        drawn(run.path, "--label", "12")
    with pytest.raises(UsageProblem, match="--eta"):
        drawn(run.path, "--sampler", "ddpm", "--eta", "1")
    for option, value in (("--eta", "nan"), ("--guidance", "inf")):
        refused = CliRunner().invoke(generate, [str(run.path), option, value])
        assert refused.exit_code == 2
        assert f"'{option}': must be" in refused.output
    with pytest.raises(UsageProblem, match=r"drawn\.jpg: images are written as \.png"):
        drawn(run.path, "--output", str(run.path.parent / "drawn.jpg"))


def test_guidance_needs_label_dropout(images: Any) -> None:
    run, _ = images.run("run", "masking={name: noise, label_dropout: 0}", "phases.0.steps=1")
    with pytest.raises(UsageProblem, match="label_dropout 0"):
        drawn(run.path, "--guidance", "2")


def test_label_is_a_name_or_a_number() -> None:
    names = ["dog", "cat", "owl"]
    assert cycle_labels(5, 3).tolist() == [0, 1, 2, 0, 1]
    assert find_label("cat", names) == 1
    assert find_label("2", names) == 2
    with pytest.raises(UsageProblem, match="'cap'") as refused:
        find_label("cap", names)
    assert refused.value.hint == "Did you mean 'cat'?"


def test_grid_places_every_image(tmp_path: Path) -> None:
    images_NCHW = torch.linspace(-1.2, 1.2, 3 * 3 * 40 * 32).view(3, 3, 40, 32)
    write_grid(tmp_path / "grid.png", images_NCHW)
    with Image.open(tmp_path / "grid.png") as found:
        levels = np.asarray(found)
    assert levels.shape == (2 * 40 + 2, 2 * 32 + 2, 3)
    expected = np.round((images_NCHW.numpy().clip(-1, 1) + 1) * 127.5).astype(np.uint8)
    for number, (top, left) in enumerate([(0, 0), (0, 34), (42, 0)]):
        found_CHW = levels[top : top + 40, left : left + 32].transpose(2, 0, 1)
        np.testing.assert_array_equal(found_CHW, expected[number])
    assert (levels[42:, 34:] == 128).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grid.png"]


def test_metrics_count_images(images: Any) -> None:
    run, report = images.run("run", "phases.0.steps=2")
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["event"] == "validation"
    assert lines[-1]["tokens"] == 359
    assert report.loss_unit == "squared error per pixel"
