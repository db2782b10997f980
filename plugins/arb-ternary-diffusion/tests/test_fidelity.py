"""Distances of drawn images to real ones, and ``arb diffusion frechet``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from arb_ternary.errors import DataError, UsageProblem
from arb_ternary_diffusion.cli.frechet import diffusion
from arb_ternary_diffusion.fidelity import (
    RealImages,
    classifier_features,
    compare_images,
    pixels,
    read_real_images,
)
from arb_ternary_diffusion.frechet import frechet_distance
from arb_ternary_text.data.shakespeare import ShakespeareConfig
from arb_ternary_text.data.shakespeare import build as shakespeare
from arb_ternary_vision.data.digits import DigitsConfig
from arb_ternary_vision.data.digits import build as digits


def test_all_real_images_are_read() -> None:
    source = digits(DigitsConfig())
    real = read_real_images(source)
    assert (len(real.train), len(real.held_out)) == (1438, 359)
    batch = source.validation.read(np.arange(359))
    assert torch.equal(real.held_out, batch.data)
    assert real.held_out_labels is not None
    assert torch.equal(real.held_out_labels, batch.extras["labels"])
    with pytest.raises(DataError, match="not images"):
        read_real_images(shakespeare(ShakespeareConfig(tokenizer="bytes")))


def test_images_are_compared_in_equal_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    train, held_out, drawn = (torch.randn(n, 1, 2, 2, generator=generator) for n in (300, 40, 100))
    real = RealImages(train, held_out, None)
    found = compare_images(drawn, real)
    assert found.images == 40
    assert found.drawn == frechet_distance(drawn[:40].numpy(), train.numpy())
    assert found.held_out == frechet_distance(held_out.numpy(), train.numpy())
    assert compare_images(held_out, real).drawn == found.held_out


def test_features_are_the_input_of_the_head() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 3)
            self.head = nn.Linear(3, 2)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.body(images.flatten(1)))
            return logits

    model = Classifier()
    images = torch.randn(300, 1, 2, 2)
    found = classifier_features("here", model, torch.device("cpu"))(images)
    np.testing.assert_allclose(found, model.body(images.flatten(1)).detach().numpy(), atol=1e-6)
    assert model.training
    assert not model.head._forward_pre_hooks
    np.testing.assert_array_equal(pixels(images), images.numpy().reshape(300, 4))
    with pytest.raises(UsageProblem, match="here: the model has no head"):
        classifier_features("here", nn.Linear(4, 2), torch.device("cpu"))


def test_command_prints_pixel_and_feature_distances(images: Any) -> None:
    run, _ = images.run("run", "phases.0.steps=1")
    judge, _ = images.run(
        "judge",
        "masking=labels",
        "model={name: convnet, width: 4, layers: 1, stages: 1}",
        "phases.0.steps=1",
    )
    result = CliRunner().invoke(
        diffusion, ["frechet", str(run.path), "--classifier", str(judge.path), "--steps", "2"]
    )
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if "drawn" in line]
    assert [line.partition(":")[0] for line in lines] == ["pixels", "features of judge"]
    assert all("held out (359 images each)" in line for line in lines)
    drawn, held_out = (
        float(word) for word in lines[0].split() if word.replace(".", "").isdigit() and "." in word
    )
    assert held_out < 1 < drawn, "an untrained model draws no digits"
