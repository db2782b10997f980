"""The models ``vit`` and ``convnet``: their computation restated by hand, and purity."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_text.models.config import FLOAT_PARTS
from arb_ternary_train.audit import audit
from arb_ternary_vision.models.convnet import Convnet
from arb_ternary_vision.models.convnet_config import ConvnetConfig
from arb_ternary_vision.models.vit import Vit
from arb_ternary_vision.models.vit_config import VitConfig

CLASSES = 5
VIT = {"width": 16, "layers": 2, "heads": 2, "image_size": (4, 6), "group_size": 32}
CONVNET = {"width": 8, "layers": 1, "image_size": (4, 6), "group_size": 32}
FLOAT = {"float_parts": FLOAT_PARTS, "activations": "float", "group_size": 128}


def vit(**changes: Any) -> Vit:
    torch.manual_seed(0)
    return Vit(VitConfig(**{**VIT, **changes}), CLASSES)


def convnet(**changes: Any) -> Convnet:
    torch.manual_seed(0)
    return Convnet(ConvnetConfig(**{**CONVNET, **changes}), CLASSES)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "vit": vit,
    "vit of three channels": lambda **more: vit(
        channels=3, patch_size=(2, 3), positions="rotary", **more
    ),
    "vit with gains": lambda **more: vit(
        learned_norms=True, query_key_norm=True, activation="swiglu", **more
    ),
    "vit with experts": lambda **more: vit(experts=3, max_moe_iters=2, positions="learned", **more),
    "convnet": convnet,
    "convnet of three stages": lambda **more: convnet(
        stages=3, channels=3, learned_norms=True, **more
    ),
}
every_model = pytest.mark.parametrize(
    "make", [pytest.param(make, id=name) for name, make in MODELS.items()]
)


def images(model: nn.Module, count: int = 4) -> Tensor:
    options: Any = model.options
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, options.channels, *options.sides, generator=generator) * 2 - 1


def loss_of(model: nn.Module, count: int = 8) -> Tensor:
    return F.cross_entropy(model(images(model, count)), torch.arange(count) % CLASSES)


# --- computation


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * gain


def test_float_vit_matches_computation_by_hand() -> None:
    model = vit(positions="both", **FLOAT)
    model.set_dtype(torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    w = {name: parameter.detach() for name, parameter in model.named_parameters()}
    x = images(model, 2).double()
    stream = (
        F.conv2d(x, w["embedding.patches.linear.weight"].view(16, 1, 2, 2), stride=2).flatten(2).mT
    )
    stream = stream + w["embedding.places.weight"]
    places = [(row, column) for row in range(2) for column in range(3)]
    for block in ("blocks.0", "blocks.1"):
        attended = torch.zeros_like(stream)
        inside = normed(stream, w[f"{block}.attention.norm.weight"])
        query, key, value = (
            inside @ w[f"{block}.attention.{part}.weight"].T for part in ("query", "key", "value")
        )
        for head in range(2):
            features = slice(8 * head, 8 * head + 8)
            for image in range(2):
                scores = torch.empty(6, 6, dtype=torch.float64)
                for i, at in enumerate(places):
                    for j, other in enumerate(places):
                        q = query[image, i, features]
                        k = key[image, j, features]
                        angle = torch.tensor(
                            [
                                (at[axis] - other[axis]) * 100.0 ** (-2 * p / 4)
                                for axis in (0, 1)
                                for p in (0, 1)
                            ]
                        ).double()
                        turned = torch.complex(q[:4], q[4:]) * torch.polar(
                            torch.ones_like(angle), angle
                        )
                        scores[i, j] = (
                            turned * torch.complex(k[:4], k[4:]).conj()
                        ).real.sum() / math.sqrt(8)
                attended[image, :, features] = scores.softmax(dim=-1) @ value[image, :, features]
        ones = torch.ones(1, dtype=torch.float64)
        stream = stream + normed(attended, ones) @ w[f"{block}.attention.output.weight"].T
        inside = normed(stream, w[f"{block}.feed_forward.norm.weight"])
        hidden = F.relu(inside @ w[f"{block}.feed_forward.up.weight"].T) ** 2
        stream = stream + normed(hidden, ones) @ w[f"{block}.feed_forward.down.weight"].T
    expected = normed(stream.mean(dim=1), w["final_norm.weight"]) @ w["head.weight"].T
    torch.testing.assert_close(model(x).detach(), expected, rtol=1e-6, atol=1e-6)


def test_float_convnet_matches_computation_by_hand() -> None:
    model = convnet(stages=2, **FLOAT)
    model.set_dtype(torch.float64)
    w = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight = w[f"{name}.weight"]
        return F.conv2d(x, weight.view(len(weight), x.size(1), 3, 3), stride=stride, padding=1)

    def over_channels(x: Tensor) -> Tensor:
        return x / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt()

    def block(name: str, x: Tensor) -> Tensor:
        hidden = F.relu(conv(f"{name}.up", over_channels(x))) ** 2
        return x + conv(f"{name}.down", over_channels(hidden))

    x = images(model, 2).double()
    stream = block("blocks.0", conv("embedding", x))
    stream = block("blocks.2", conv("blocks.1.1", over_channels(stream), stride=2))
    assert stream.shape == (2, 16, 2, 3)
    mean = stream.mean(dim=(2, 3))
    expected = mean / (mean.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() @ w["head.weight"].T
    torch.testing.assert_close(model(x).detach(), expected, rtol=1e-6, atol=1e-6)


def test_vit_without_positions_ignores_the_order_of_patches() -> None:
    model = vit(positions="learned", **FLOAT)
    assert isinstance(model.embedding.places, nn.Embedding)
    nn.init.zeros_(model.embedding.places.weight)
    x = images(model)
    torch.testing.assert_close(model(x), model(x.roll(2, dims=3)), rtol=1e-4, atol=1e-4)
    turning = vit(positions="rotary", **FLOAT)
    assert not torch.allclose(turning(x), turning(x.roll(2, dims=3)), atol=1e-3)


# --- parts


@every_model
@pytest.mark.parametrize("gradients", ["float", "int8"])
def test_pure_model_votes_in_every_layer(make: Callable[..., nn.Module], gradients: str) -> None:
    model = make(gradients=gradients)
    loss = loss_of(model)
    loss.backward()
    assert model(images(model, 3)).shape == (3, CLASSES)
    assert audit(model).pure
    # Logits of about unit variance add half a nat to log V; a wrong scale anywhere adds several.
    assert abs(float(loss.detach()) - math.log(CLASSES)) < 1.0
    for name, module in ternary_modules(model):
        assert module.logical_votes().any(), f"{name} cast no votes"


@pytest.mark.parametrize("make", [vit, convnet])
@pytest.mark.parametrize("part", FLOAT_PARTS)
def test_float_part_replaces_its_own_weights_only(
    make: Callable[..., nn.Module], part: str
) -> None:
    pure = make(learned_norms=True)
    mixed = make(learned_norms=True, float_parts=(part,))
    belongs = {
        "embedding": lambda name: name.startswith("embedding"),
        "head": lambda name: name == "head",
        "norms": lambda name: "norm" in name,
        "linears": lambda name: name.startswith("blocks.") and "norm" not in name,
    }[part]
    before, after = ({name for name, _ in ternary_modules(model)} for model in (pure, mixed))
    # A norm between two convolutions is named by its index in their sequence.
    before, after = (
        {name.replace(".0.norm", ".norm").replace("1.0", "norm") for name in names}
        for names in (before, after)
    )
    assert before - after == {name for name in before if belongs(name)} != set()
    planned = mixed.options.planned()
    assert (planned.kinds, planned.matrices) == ({"ternary", "float"}, part != "norms")


@pytest.mark.parametrize("config", [VitConfig, ConvnetConfig])
def test_plan_of_a_float_model_is_float(config: Any) -> None:
    assert config(**FLOAT).planned().kinds == {"float"}
    assert config().planned().kinds == {"ternary"}


@pytest.mark.parametrize("make", [vit, convnet])
def test_activation_checkpointing_gives_the_same_votes(make: Callable[..., nn.Module]) -> None:
    votes = []
    for recompute in (False, True):
        model: Any = make()
        model.set_activation_checkpointing(recompute, 1)
        loss_of(model.train()).backward()
        votes.append([module.logical_votes() for _, module in ternary_modules(model)])
    assert all(torch.equal(a, b) for a, b in zip(*votes, strict=True))


@pytest.mark.parametrize("make", [vit, convnet])
def test_set_dtype(make: Callable[..., nn.Module]) -> None:
    model: Any = make()
    model.set_dtype(torch.bfloat16)
    assert model(images(model)).dtype == torch.bfloat16


@pytest.mark.parametrize("make", [vit, convnet])
def test_zero_residual_starts_as_the_identity(make: Callable[..., nn.Module]) -> None:
    model: Any = make(zero_residual=True, **({"stages": 1} if make is convnet else {}))
    first = model.embedding(images(model))
    x = first
    for block in model.blocks:
        x = block(x, model._positions(x, None)) if make is vit else block(x)
    assert torch.equal(x, first)


# --- faults


@pytest.mark.parametrize("make", [vit, convnet])
def test_models_refuse_images_of_another_shape(
    make: Callable[..., nn.Module],
) -> None:
    model = make()
    with pytest.raises(UsageProblem) as caught:
        model(torch.zeros(2, 3, 8, 8))
    message = f"{caught.value} {caught.value.hint}"
    assert (
        "3 channels of 8 x 8 pixels; the model's channels is 1 and its image_size is [4, 6]"
        in message
    )
    assert "Set channels: 3 and image_size: [8, 8]" in message
    with pytest.raises(UsageProblem, match=r"must be \[B, C, H, W\]"):
        model(torch.zeros(4, 6))


REFUSED = [
    (
        VitConfig,
        {"patch_size": 3},
        "'patch_size' must divide 'image_size'; a height of 3 does not divide 8 pixels",
    ),
    (VitConfig, {"width": 12, "heads": 2}, "'width' must be a multiple of 4 'heads'"),
    (VitConfig, {"head_dim": 6}, "'head_dim' must be a multiple of 4"),
    (VitConfig, {"positions": "learned", "rotary_base": 10.0}, "'rotary_base' has no effect"),
    (VitConfig, {"experts": 0, "max_moe_iters": 2}, "no effect because 'experts' is 0"),
    (VitConfig, {"image_size": (8, 0)}, "'image_size' must be from 1 to 8192 pixels"),
    (VitConfig, {**FLOAT, "gradients": "int8"}, "'gradients' has no effect"),
    (ConvnetConfig, {"stages": 5}, "'stages' must be at most 4 for 'image_size' 8"),
    (ConvnetConfig, {"kernel_size": 4}, "'kernel_size' must be an odd number"),
    (ConvnetConfig, {"channels": 0}, "'channels' must be greater than 0"),
]


@pytest.mark.parametrize(("config", "changed", "message"), REFUSED)
def test_configs_refuse_contradictions(config: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.split("'")[1]) as caught:
        config(**changed)
    assert message in str(caught.value)
