"""The models ``dit`` and ``unet``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arb_ternary.errors import DataError
from arb_ternary.optim.protocol import collect_trainable
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_diffusion.models.config import DiTConfig, UNetConfig
from arb_ternary_diffusion.models.denoiser import time_features
from arb_ternary_diffusion.models.dit import DiT
from arb_ternary_diffusion.models.unet import UNet
from arb_ternary_text.models.config import FLOAT_PARTS
from arb_ternary_train.audit import audit
from arb_ternary_train.capabilities import takes_time
from arb_ternary_votes.scaled_votes import ScaledVotes

KINDS = ("dit", "unet")


def make_model(kind: str, **options: Any) -> DiT | UNet:
    torch.manual_seed(0)
    if kind == "dit":
        return DiT(DiTConfig(**{"width": 16, "layers": 2, "heads": 2, **options}), 3)
    return UNet(UNetConfig(**{"width": 8, "layers": 1, **options}), 3)


def noisy_images(channels: int = 1, height: int = 8, width: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, channels, height, width, generator=generator), torch.linspace(0, 1, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_of_a_pure_model_learns(kind: str) -> None:
    model = make_model(kind)
    assert takes_time(model)
    assert audit(model).pure
    noisy, time = noisy_images()
    initial = {name: each.trits() for name, each in ternary_modules(model)}
    optimizer = ScaledVotes(dict(ternary_modules(model)), lr=0.5)
    # Weights that start at zero, from the condition into the blocks, hide those before them.
    for _ in range(8):
        model(noisy, time, torch.tensor([0, 1, 2, 3, 3])).square().mean().backward()
        optimizer.step()
    still = [
        name for name, each in ternary_modules(model) if torch.equal(each.trits(), initial[name])
    ]
    assert still == []


@pytest.mark.parametrize("kind", KINDS)
def test_float_model_has_as_many_weights(kind: str) -> None:
    pure = make_model(kind)
    floating = make_model(kind, float_parts=FLOAT_PARTS, activations="float")
    found = collect_trainable(floating)
    assert set(found.parts) == {"float"}
    matrices = sum(each.numel() for each in found.floats.values() if each.dim() > 1)
    assert matrices == sum(math.prod(each.trits().shape) for _, each in ternary_modules(pure))
    gains = [name for name, each in found.floats.items() if each.dim() == 1]
    assert gains
    assert all("norm" in name for name in gains)


@pytest.mark.parametrize("kind", KINDS)
def test_plan_is_what_an_optimizer_finds(kind: str) -> None:
    for options in (
        {},
        {"float_parts": FLOAT_PARTS, "activations": "float"},
        {"float_parts": ("norms", "head")},
    ):
        model = make_model(kind, **options)
        assert model.options.planned().kinds == set(collect_trainable(model).parts)


@pytest.mark.parametrize(
    ("kind", "options"), [("dit", {"patch_size": (4, 2)}), ("unet", {"levels": 3})]
)
def test_predictions_have_the_shape_of_images(kind: str, options: dict[str, Any]) -> None:
    model = make_model(kind, image_size=(8, 12), channels=3, **options)
    noisy, time = noisy_images(3, 8, 12)
    assert model(noisy, time).shape == noisy.shape


def test_join_patches_inverts_the_cut() -> None:
    model = make_model("dit", image_size=(4, 6), patch_size=(2, 3), channels=2)
    assert isinstance(model, DiT)
    images = torch.arange(2 * 2 * 4 * 6.0).view(2, 2, 4, 6)
    cut = [
        images[:, :, row : row + 2, column : column + 3].reshape(2, -1)
        for row in (0, 2)
        for column in (0, 3)
    ]
    assert torch.equal(model.join_patches(torch.stack(cut, dim=1)), images)


@pytest.mark.parametrize("kind", KINDS)
def test_each_image_has_its_own_time_and_class(kind: str) -> None:
    model = make_model(kind, float_parts=FLOAT_PARTS, activations="float")
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.any():  # starts at zero
            nn.init.normal_(module.weight, std=0.1)
    noisy, time = noisy_images()
    labels = torch.tensor([0, 1, 2, 0, 1])
    found = model(noisy, time, labels)
    for changed in (model(noisy, time.flip(0), labels), model(noisy, time, (labels + 1) % 3)):
        assert not torch.allclose(changed[0], found[0], atol=1e-4)
    alone = torch.cat(
        [model(noisy[i : i + 1], time[i : i + 1], labels[i : i + 1]) for i in range(5)]
    )
    torch.testing.assert_close(alone, found, rtol=1e-4, atol=1e-5)
    any_class = model(noisy, time, torch.full((5,), 3))
    torch.testing.assert_close(model(noisy, time), any_class, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_class_is_refused(kind: str) -> None:
    noisy, time = noisy_images()
    with pytest.raises(DataError, match="from 0 to 4, and the model was made for 3 classes"):
        make_model(kind)(noisy, time, torch.tensor([0, 1, 2, 3, 4]))


@pytest.mark.parametrize("kind", KINDS)
def test_set_dtype(kind: str) -> None:
    noisy, time = noisy_images()
    for options in ({}, {"float_parts": FLOAT_PARTS, "activations": "float"}):
        model = make_model(kind, **options)
        wide = model(noisy, time)
        model.set_dtype(torch.bfloat16)
        narrow = model(noisy, time)
        assert narrow.dtype == torch.bfloat16
        torch.testing.assert_close(narrow.float(), wide, rtol=0.2, atol=0.3)


def test_time_features_are_sines_and_cosines() -> None:
    time = np.array([0.0, 0.001, 0.5, 1.0])
    speed = 10000.0 ** (-2 * np.arange(3) / 6)
    angle = 1000 * time[:, None] * speed
    expected = math.sqrt(2) * np.concatenate((np.sin(angle), np.cos(angle)), axis=1)
    found = time_features(torch.from_numpy(time), 6)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    assert float(time_features(torch.rand(50), 8).square().mean()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            DiTConfig,
            {"width": 15, "heads": 1, "positions": "learned", "head_dim": 4},
            "'width' must be even",
        ),
        (DiTConfig, {"patch_size": 3}, "3 does not divide 8 pixels"),
        (DiTConfig, {"width": 20, "heads": 8}, "8 does not divide 20"),
        (UNetConfig, {"levels": 5}, "5 levels need multiples of 16"),
        (UNetConfig, {"image_size": (8, 0)}, "'image_size' must be from 1"),
    ],
)
def test_configs_refuse_contradictions(config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**options)
