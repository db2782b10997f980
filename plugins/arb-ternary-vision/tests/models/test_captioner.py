"""The captioner: what a character sees, cached against whole texts, purity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_text.models.config import FLOAT_PARTS
from arb_ternary_train.audit import audit
from arb_ternary_vision.models.captioner import Captioner
from arb_ternary_vision.models.captioner_config import CaptionerConfig

VOCABULARY = 7
FLOAT = {"float_parts": FLOAT_PARTS, "activations": "float", "group_size": 128}


def captioner(**changed: Any) -> Captioner:
    torch.manual_seed(0)
    small = {
        "width": 16,
        "layers": 2,
        "image_layers": 1,
        "heads": 2,
        "image_size": 4,
        "max_length": 6,
        "group_size": 32,
    }
    return Captioner(CaptionerConfig(**{**small, **changed}), VOCABULARY)


def images(count: int = 3) -> Tensor:
    return torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(1)) * 2 - 1


def texts(count: int = 3, length: int = 5) -> Tensor:
    return torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(2))


VARIANTS: list[dict[str, Any]] = [
    {},
    {"positions": "learned", "learned_norms": True, "scale_rule": "frozen"},
    {
        "positions": "rotary",
        "image_layers": 0,
        "gradients": "int8",
        "experts": 2,
        "experts_per_token": 1,
    },
]


@pytest.mark.parametrize("options", VARIANTS)
def test_pure_captioner_votes_in_every_layer(options: dict[str, Any]) -> None:
    model = captioner(**options)
    logits = model(texts(16), images=images(16))
    assert logits.shape == (16, 5, VOCABULARY)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), texts(16)[:, 1:].flatten()).backward()
    assert audit(model).pure
    for name, module in ternary_modules(model):
        assert module.logical_votes().any(), f"{name} cast no votes"
    planned = model.options.planned()
    assert (planned.kinds, planned.exponents) == (
        {"ternary"},
        options.get("scale_rule") != "frozen",
    )


def test_character_sees_the_image_and_earlier_characters() -> None:
    model = captioner(**FLOAT)
    before = texts()
    after = texts()
    after[:, 3] = (after[:, 3] + 1) % VOCABULARY
    whole = model(before, images=images())
    changed = model(after, images=images())
    torch.testing.assert_close(whole[:, :3], changed[:, :3])
    assert not torch.allclose(whole[:, 3:], changed[:, 3:])
    other = images()
    other[:, :, 3, 3] += 0.5
    assert not torch.allclose(model(before, images=other)[:, 0], whole[:, 0])


def test_patches_see_each_other_in_text_blocks() -> None:
    model = captioner(image_layers=0, **FLOAT)
    states = model.image_states(images())
    moved = states.clone()
    moved[:, -1] += 1
    ends = [model._run(x, model.blocks, None)[:, 0] for x in (states, moved)]
    assert not torch.allclose(*ends)


def test_write_takes_the_most_likely_character() -> None:
    model = captioner().eval()
    expected = []
    with torch.no_grad():
        for image in images(8).split(1):
            text = [3]
            while len(text) <= 6 and (len(text) == 1 or text[-1] != 3):
                text.append(int(model(torch.tensor([text]), images=image)[0, -1].argmax()))
            expected.append([token for token in text if token != 3])
    assert model.write(images(8), 3) == expected


def test_captioner_refuses_what_it_cannot_do() -> None:
    model = captioner()
    for arguments, message in (
        ({"tokens_BS": texts()}, "there is none"),
        ({"tokens_BS": texts(3, 7), "images": images()}, "7 characters exceeds max_length, 6"),
        ({"tokens_BS": texts(), "images": torch.zeros(3, 1, 8, 8)}, "the model's channels is 1"),
    ):
        with pytest.raises(UsageProblem, match=message):
            model(**arguments)
    assert not model.grows
