"""The data source ``digits``."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from arb_ternary_vision.data.digits import DigitsConfig, build


def rows(samples):
    """Return each image with its label as bytes, which can be sorted."""
    return [
        image.tobytes() + bytes([label])
        for image, label in zip(samples.data, samples.extras["labels"], strict=True)
    ]


def test_parts_are_the_whole_set():
    found = build(DigitsConfig())
    raw = load_digits()
    whole = [
        image.astype(np.uint8).tobytes() + bytes([label])
        for image, label in zip(raw.images, raw.target, strict=True)
    ]
    assert len(found.train) == 1438
    assert len(found.validation) == 359
    assert sorted(rows(found.train) + rows(found.validation)) == sorted(whole)
    assert found.image_shape == (1, 8, 8)
    assert found.classes == tuple("0123456789")
    assert found.train.data.max() == 16


def test_split_is_fixed():
    found = build(DigitsConfig())
    raw = load_digits()
    held = np.bincount(found.validation.extras["labels"])
    assert held.tolist() == [round(count / 5) for count in np.bincount(raw.target)]
    # Accuracies that were measured with another split could not be compared.
    assert found.fingerprint() == "015f73266b81f4e5f36c002b9063af7026c06de2cd61683d6f37976e8e16ecff"


def test_tuning_uses_training_images_only():
    found = build(DigitsConfig())
    tuning = build(DigitsConfig(tuning=True))
    assert sorted(rows(tuning.train) + rows(tuning.validation)) == sorted(rows(found.train))
    assert np.bincount(tuning.validation.extras["labels"]).min() >= 28
