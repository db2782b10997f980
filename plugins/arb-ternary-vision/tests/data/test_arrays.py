"""The data source ``image_arrays``."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest

from arb_ternary.errors import ConfigError, DataError
from arb_ternary_testing.component import make_choice

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (20, 5, 4), dtype=np.uint8)
LABELS = np.arange(20) % 2


def source(**options):
    return make_choice("data", "image_arrays", options).build()


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("images.npy", IMAGES)
    np.save("labels.npy", LABELS.astype(np.uint8))
    np.savez_compressed(
        "all.npz", x_train=IMAGES, y_train=LABELS, x_test=IMAGES[:3], y_test=LABELS[:3]
    )
    return tmp_path


def test_files_and_archive_members_are_equal(files):
    loose = source(images="images.npy", labels="labels.npy")
    packed = source(images="all.npz:x_train", labels="all.npz:y_train")
    assert loose.fingerprint() == packed.fingerprint()
    assert loose.image_shape == (1, 5, 4)
    assert loose.classes == ("0", "1")
    # One of the ten samples of each class.
    assert np.bincount(loose.validation.extras["labels"]).tolist() == [1, 1]
    both = [*loose.train.data, *loose.validation.data]
    assert sorted(image.tobytes() for image in both) == sorted(image.tobytes() for image in IMAGES)


def test_separate_validation_arrays(files):
    found = source(
        images="all.npz:x_train",
        labels="all.npz:y_train",
        validation_images="all.npz:x_test",
        validation_labels="all.npz:y_test",
        classes=["odd", "even"],
    )
    assert np.array_equal(found.train.data[:, 0], IMAGES)
    assert np.array_equal(found.validation.data[:, 0], IMAGES[:3])
    assert found.attachments()["classes"] == ["odd", "even"]
    with pytest.raises(ConfigError, match="belong together"):
        source(images="images.npy", labels="labels.npy", validation_images="images.npy")


def test_channels_first_or_last(files):
    colour = RNG.integers(0, 256, (20, 5, 4, 3), dtype=np.uint8)
    np.save("last.npy", colour)
    np.save("first.npy", colour.transpose(0, 3, 1, 2))
    last = source(images="last.npy", labels="labels.npy")
    first = source(images="first.npy", labels="labels.npy", channels_first=True)
    assert last.image_shape == (3, 5, 4)
    assert last.fingerprint() == first.fingerprint()
    with pytest.raises(DataError, match=r"first\.npy: 4 channels of .*\nSet channels_first: true"):
        source(images="first.npy", labels="labels.npy")


def test_floats_and_levels(files):
    np.save("floats.npy", np.linspace(-1, 1, 400).reshape(20, 5, 4))
    found = source(images="floats.npy", labels="labels.npy")
    assert next(found.held_out(9, 1, None)).data.abs().max() <= 1
    np.save("few.npy", np.arange(400).reshape(20, 5, 4) % 17)
    few = source(images="few.npy", labels="labels.npy", levels=16)
    assert few.train.read(np.arange(len(few.train))).data.unique().tolist() == [
        level / 8 - 1 for level in range(17)
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"images": "nothing.npy"}, r"nothing\.npy: no such file"),
        ({"images": "all.npz"}, r"Name an array of the archive: all\.npz:NAME"),
        (
            {"images": "all.npz:x_trein"},
            r"the archive has no array 'x_trein'\nDid you mean x_train\?",
        ),
        ({"images": "images.bin"}, r"images\.bin: not a \.npy file"),
        ({"labels": "images.npy"}, r"images\.npy: must be 20 integers"),
        ({"images": "labels.npy"}, r"labels\.npy: images must be integers or floats"),
        ({"levels": 100}, "pixels must be from 0 to 100; they are from .*\nSet levels"),
        (
            {"images": "wide.npy"},
            "pixels must be from -1 to 1; they are from 1.5 to 1.5\nScale them",
        ),
        ({"images": "nan.npy"}, "pixels must be from -1 to 1"),
        ({"images": "objects.npy"}, r"objects\.npy: the array holds Python objects"),
        ({"images": "short.npy"}, r"short\.npy: the array cannot be read"),
        ({"images": "broken.npz:x"}, r"broken\.npz:x: the array cannot be read"),
        ({"classes": ["only"]}, "label 1 of sample 0 is none of the 1 classes"),
    ],
)
def test_build_names_the_fault(files, options, words):
    np.save("wide.npy", np.full((20, 2, 2), 1.5))
    np.save("nan.npy", np.full((20, 2, 2), np.nan))
    np.save("objects.npy", np.full((20, 2, 2), None), allow_pickle=True)
    (files / "short.npy").write_bytes((files / "images.npy").read_bytes()[:-30])
    (files / "broken.npz").write_bytes((files / "all.npz").read_bytes()[:-100])
    with pytest.raises(DataError, match=words):
        source(**{"images": "images.npy", "labels": "labels.npy", **options})


def test_huge_claimed_array_is_refused_unread(files):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (10**6, 10**3, 10**3)}
    )
    with zipfile.ZipFile("bomb.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue())
    with pytest.raises(
        DataError,
        match=r"bomb\.npz:x: 1,000,000 megabytes are needed, more than max_megabytes, 4,096",
    ):
        source(images="bomb.npz:x", labels="labels.npy")


def test_build_refuses_labels_out_of_range(files):
    for wrong in (LABELS + 10**9, LABELS - 1, LABELS.astype(np.uint64) + np.uint64(2**63)):
        np.save("labels.npy", wrong)
        with pytest.raises(
            DataError,
            match=f"labels.npy: labels must be from .* from {wrong.min()} to {wrong.max()}",
        ):
            source(images="images.npy", labels="labels.npy")


def test_member_that_is_not_an_array_is_not_offered(files):
    with zipfile.ZipFile("all.npz", "a") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(DataError, match=r"no array 'readme.txt'"):
        source(images="all.npz:readme.txt", labels="all.npz:y_train")


def test_config_refuses_contradictions(files):
    with pytest.raises(ConfigError, match="validation_images: are the training images"):
        source(
            images="images.npy",
            labels="labels.npy",
            validation_images="images.npy",
            validation_labels="labels.npy",
        )
    with pytest.raises(ConfigError, match="classes: has a name twice: a, a"):
        source(images="images.npy", labels="labels.npy", classes=["a", "a"])
