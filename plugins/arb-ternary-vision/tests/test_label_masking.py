"""The masking strategy ``labels`` and its augmentation of images."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from arb_ternary.errors import ConfigError, DataError
from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch
from arb_ternary_testing.component import make_choice
from arb_ternary_train.protocols import Scores
from arb_ternary_vision.masking.augment import augment, erased_pixels, warp
from arb_ternary_vision.masking.config import Augmentation, Change, LabelsConfig
from arb_ternary_vision.masking.labels import LabelMasking

CHANGES = Change.__args__


def batch(rows=6, side=8):
    rng = np.random.default_rng(1)
    images = torch.from_numpy(rng.uniform(-1, 1, (rows, 1, side, side)).astype(np.float32))
    return Batch(images, torch.arange(rows) * 7 + 100, {"labels": torch.arange(rows) % 3})


def apply(strategy, given, seed=3, training=True):
    return strategy.apply(
        given, torch.Generator().manual_seed(seed), MaskContext(12, 5, 3, training)
    )


def strategy(*changes):
    return make_choice("masking", "labels", {"augment": [dict(each) for each in changes]}).build()


ONE_OF_EACH = [{"name": name} for name in CHANGES]
EVERY = strategy(*ONE_OF_EACH)


def test_inputs_are_images_and_targets_labels():
    given = batch()
    for each, training in ((strategy(), True), (EVERY, False)):
        masked = apply(each, given, training=training)
        assert torch.equal(masked.inputs, given.data)
        assert masked.inputs is not given.data
        assert masked.targets.tolist() == [0, 1, 2, 0, 1, 2]
        assert masked.loss_mask.tolist() == [True] * 6


def test_accuracy_is_of_the_most_likely_class():
    assert isinstance(EVERY, Scores)
    logits = torch.tensor([[0.1, 0.9, 0.0], [3.0, -1.0, 2.0], [-5.0, -4.0, -3.0]])
    masked = MaskedBatch(
        torch.zeros(3, 1, 1, 1), torch.tensor([1, 2, 2]), torch.ones(3, dtype=torch.bool)
    )
    assert EVERY.scores(logits, masked)["accuracy"].tolist() == [1.0, 0.0, 1.0]


def test_masking_refuses_data_without_labels():
    with pytest.raises(DataError, match="have no labels"):
        apply(EVERY, Batch(torch.zeros(2, 9), torch.arange(2)))


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_pure_and_stays_in_range(name):
    each = strategy({"name": name, "amount": 0.5} if name != "flip" else {"name": name})
    given = batch()
    before = given.data.clone()
    state = torch.random.get_rng_state()
    first = apply(each, given).inputs
    assert torch.equal(given.data, before)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(987)
    assert torch.equal(apply(each, given).inputs, first)
    assert not torch.equal(apply(each, given, seed=4).inputs, first)
    assert not torch.allclose(first, before, atol=1e-3)
    assert first.abs().max() <= 1


def test_changes_do_not_depend_on_the_row():
    given = batch()
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    moved = Batch(
        given.data[order], given.sample_ids[order], {"labels": given.extras["labels"][order]}
    )
    assert torch.equal(apply(EVERY, given).inputs[order], apply(EVERY, moved).inputs)
    alone = Batch(given.data[2:3], given.sample_ids[2:3], {"labels": given.extras["labels"][2:3]})
    torch.testing.assert_close(
        apply(EVERY, given).inputs[2:3], apply(EVERY, alone).inputs, rtol=0, atol=1e-6
    )


def moved(images, name, amount, *draws):
    """Move images with given draws in [0, 1): 0.75 is half of the amount."""
    drawn = torch.tensor([0.0, *draws, *[0.5] * (4 - len(draws))]).expand(len(images), 5)
    return warp(images, [Augmentation(name=name, amount=amount, chance=1.0)], {name: drawn})


def test_moves_match_moves_by_hand():
    images = batch().data
    right = torch.cat([images[..., :1], images[..., :-1]], dim=-1)  # the edge is repeated
    torch.testing.assert_close(moved(images, "shift", 0.25, 0.75), right, rtol=0, atol=1e-5)
    down = torch.cat([images[..., :1, :], images[..., :-1, :]], dim=-2)
    torch.testing.assert_close(moved(images, "shift", 0.25, 0.5, 0.75), down, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        moved(images, "rotate", 180.0, 0.75), images.rot90(-1, (2, 3)), rtol=0, atol=1e-5
    )
    torch.testing.assert_close(moved(images, "flip", None), images.flip(3), rtol=0, atol=1e-5)


def test_scale_and_shear_keep_the_centre():
    y, x = torch.meshgrid(torch.arange(9.0) - 4, torch.arange(9.0) - 4, indexing="ij")
    ramp = (x / 4)[None, None]
    # Scaled by 1.5: the pixel at x was at x / 1.5.
    torch.testing.assert_close(
        moved(ramp, "scale", 0.75, 5 / 6)[0, 0], x / 4 / 1.5, rtol=0, atol=1e-5
    )
    sheared = moved(ramp, "shear", 45.0, 1.0)[0, 0]  # by the height: tan(45 degrees) = 1
    inside = (x.abs() + y.abs()) <= 4
    torch.testing.assert_close(sheared[inside], ((x + y) / 4)[inside], rtol=0, atol=1e-5)


def test_moves_are_applied_in_order():
    images = batch().data
    changes = [
        Augmentation(name=name, amount=amount, chance=1.0)
        for name, amount in (("shift", 0.25), ("rotate", 180.0))
    ]
    drawn = {
        name: torch.tensor([0.0, 0.75, 0.5, 0.5, 0.5]).expand(6, 5) for name in ("shift", "rotate")
    }
    by_hand = torch.cat([images[..., :1], images[..., :-1]], dim=-1).rot90(-1, (2, 3))
    torch.testing.assert_close(warp(images, changes, drawn), by_hand, rtol=0, atol=1e-5)


def erased(name, amount, *draws, side=8):
    drawn = torch.tensor([[0.0, *draws, *[0.0] * (4 - len(draws))]])
    return erased_pixels(
        torch.Size((1, 1, side, side)), Augmentation(name=name, amount=amount), drawn
    )[0, 0]


def test_erase_rectangle_and_bands():
    # 1/4 of the area, as wide as high, in the middle: 4 x 4 of 8 x 8.
    square = erased("erase", 0.5, 0.5, 0.5, 0.5, 0.5)
    assert square.sum() == 16
    assert square[2:6, 2:6].all()
    rows = erased("erase_rows", 0.5, 0.5, 0.0, 1.0)
    assert rows[6:].all()
    assert rows.sum() == 16
    columns = erased("erase_columns", 0.5, 0.75)
    assert columns[:, :3].all()
    assert columns.sum() == 24


def test_brightness_noise_and_contrast_have_their_amounts():
    images = batch(4000, 4).data * 0.25
    ids = torch.arange(4000)
    bright = augment(images, [Augmentation(name="brightness", amount=0.5)], ids, 7) - images
    assert bright.std(dim=(1, 2, 3)).max() < 1e-6
    # Uniform in [-0.5, 0.5): a standard deviation of 0.5 / sqrt(3).
    assert bright.mean(dim=(1, 2, 3)).std() == pytest.approx(0.5 / 3**0.5, rel=0.05)
    noise = augment(images, [Augmentation(name="noise", amount=0.1)], ids, 7) - images
    assert noise.std() == pytest.approx(0.1, rel=0.02)
    assert noise.mean() == pytest.approx(0.0, abs=0.002)
    assert ((noise / 0.1) ** 4).mean() == pytest.approx(3.0, rel=0.03)  # of a normal distribution
    contrast = augment(images, [Augmentation(name="contrast", amount=0.5)], ids, 7)
    torch.testing.assert_close(
        contrast.mean(dim=(1, 2, 3)), images.mean(dim=(1, 2, 3)), rtol=0, atol=1e-6
    )
    ratio = contrast.std(dim=(1, 2, 3)) / images.std(dim=(1, 2, 3))
    assert 0.5 <= ratio.min() < 0.51
    assert 1.49 < ratio.max() <= 1.5


def test_chance_is_the_share_of_changed_images():
    given = batch(4000, 4)
    for name, chance, expected in (
        ("flip", None, 0.5),
        ("noise", 0.25, 0.25),
        ("erase_rows", 0.0, 0.0),
    ):
        out = augment(given.data, [Augmentation(name=name, chance=chance)], given.sample_ids, 7)
        changed = ((out - given.data).abs().amax(dim=(1, 2, 3)) > 1e-4).float().mean()
        assert changed == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(
    ("augment", "words"),
    [
        ([{"name": "flipp"}], "flip"),
        ([{"name": "flip", "amount": 1.0}], "no effect because a flip has no amount"),
        ([{"name": "shift", "amount": 1.0}], "less than 1 for shift"),
        ([{"name": "noise", "amount": 0.0}], "greater than 0"),
        ([{"name": "noise"}, {"name": "noise"}], "noise more than once"),
        ([{"name": "noise", "chance": 2}], "between 0 and 1"),
    ],
)
def test_masking_refuses_meaningless_options(augment, words):
    with pytest.raises(ConfigError, match=words):
        make_choice("masking", "labels", {"augment": augment})


def test_default_options():
    assert LabelMasking(LabelsConfig()).config.augment == []
