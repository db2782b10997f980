"""Runs on pictures from the config to the grid: resumed, watched, drawn from."""

from __future__ import annotations

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
from arb_ternary_diffusion.pictures import labels_of, write_grid
from arb_ternary_train.cli.generate import generate
from arb_ternary_train.restore import load_run, measure

UNET = "model={name: unet, width: 8, layers: 1}"
MODELS = {
    "dit": (),
    "unet predicting x0": (UNET, "masking={name: noise, prediction: x0, schedule: linear}"),
}


@pytest.mark.parametrize("overrides", MODELS.values(), ids=MODELS)
def test_a_resumed_run_has_the_bytes_of_one_that_was_not_interrupted(
    pictures: Any, files_in: Any, overrides: tuple[str, ...]
) -> None:
    run, report = pictures.run("run", *overrides)
    assert report.audit.pure
    assert report.tokens == 32
    assert report.baselines == {}, "those of the data are of classes"
    assert measure(load_run(run.path))[0].loss == report.validation_loss
    whole = files_in(run.path)
    shutil.rmtree(run.checkpoints / "step-00000004")
    pictures.run("run", *overrides, resume="auto")
    assert files_in(run.path) == whole


def test_a_grid_of_samples_is_drawn_at_evaluations_and_does_not_disturb_the_run(
    pictures: Any, files_in: Any
) -> None:
    tracker = "trackers=[{name: sample_grid, count: 10, steps: 2}]"
    plain, _ = pictures.run("plain")
    watched, _ = pictures.run("watched", tracker)
    assert files_in(watched.path) == files_in(plain.path)
    grids = sorted((watched.path / "samples").iterdir())
    assert [grid.name for grid in grids] == ["step-00000002.png", "step-00000004.png"]
    with Image.open(grids[0]) as picture:
        assert picture.size == (4 * 32 + 3 * 2, 3 * 32 + 2 * 2)  # ten in a square
    assert grids[0].read_bytes() != grids[1].read_bytes()
    again, _ = pictures.run("again", tracker)
    assert (again.path / "samples" / grids[1].name).read_bytes() == grids[1].read_bytes()


def test_the_tracker_refuses_a_run_that_draws_nothing(pictures: Any) -> None:
    classifier = ("masking=labels", "model={name: vit, width: 16, layers: 1, heads: 2}")
    with pytest.raises(ArbError, match="its masking is 'labels', and pictures are drawn from"):
        pictures.run("run", *classifier, "trackers=[sample_grid]")


def drawn(run: Path, *arguments: str) -> Any:
    file = run.parent / "drawn.png"
    result = CliRunner().invoke(
        generate, [str(run), "--output", str(file), "--steps", "3", *arguments]
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    with Image.open(file) as picture:
        return np.asarray(picture)


def test_pictures_are_drawn_by_seed_class_sampler_and_guidance(pictures: Any) -> None:
    run, _ = pictures.run("run", "phases.0.lr_schedule=constant", "phases.0.steps=12")
    first = drawn(run.path, "--count", "4", "--seed", "1")
    assert first.shape == (2 * 32 + 2, 2 * 32 + 2)
    assert np.array_equal(drawn(run.path, "--count", "4", "--seed", "1"), first)
    nine = drawn(run.path, "--count", "9", "--seed", "1")
    assert np.array_equal(nine[:32, :66], first[:32]), (
        "the first pictures do not depend on how many there are"
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
    for option, value in (("eta", "nan"), ("guidance", "inf")):
        with pytest.raises(UsageProblem, match=f"{option}: must be a finite number, not {value}"):
            drawn(run.path, f"--{option}", value)
    with pytest.raises(UsageProblem, match=r"drawn\.jpg: pictures are written as \.png"):
        drawn(run.path, "--output", str(run.path.parent / "drawn.jpg"))


def test_guidance_needs_a_model_that_knows_pictures_of_any_class(pictures: Any) -> None:
    run, _ = pictures.run("run", "masking={name: noise, label_dropout: 0}", "phases.0.steps=1")
    with pytest.raises(UsageProblem, match="label_dropout 0"):
        drawn(run.path, "--guidance", "2")


def test_a_class_is_found_by_name_and_by_number() -> None:
    assert labels_of(None, 5, 3, None).tolist() == [0, 1, 2, 0, 1]
    assert labels_of("cat", 2, 3, ["dog", "cat", "owl"]).tolist() == [1, 1]
    assert labels_of("2", 1, 3, ["dog", "cat", "owl"]).tolist() == [2]
    with pytest.raises(UsageProblem, match="'cap'") as refused:
        labels_of("cap", 1, 3, ["dog", "cat", "owl"])
    assert refused.value.hint == "Did you mean 'cat'?"


def test_a_grid_has_every_picture_in_its_place_and_its_colours(tmp_path: Path) -> None:
    pictures = torch.linspace(-1.2, 1.2, 3 * 3 * 40 * 32).view(3, 3, 40, 32)
    write_grid(tmp_path / "grid.png", pictures, columns=2)
    with Image.open(tmp_path / "grid.png") as found:
        levels = np.asarray(found)
    assert levels.shape == (2 * 40 + 2, 2 * 32 + 2, 3)
    expected = np.round((pictures.numpy().clip(-1, 1) + 1) * 127.5).astype(np.uint8)
    for number, (top, left) in enumerate([(0, 0), (0, 34), (42, 0)]):
        found_CHW = levels[top : top + 40, left : left + 32].transpose(2, 0, 1)
        np.testing.assert_array_equal(found_CHW, expected[number])
    assert (levels[42:, 34:] == 128).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grid.png"]


def test_metrics_speak_of_pictures(pictures: Any) -> None:
    run, report = pictures.run("run", "phases.0.steps=2")
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["event"] == "validation"
    assert lines[-1]["tokens"] == 359
    assert report.loss_unit == "squared error per pixel"
