"""The data source ``images``."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from arb_ternary.errors import ConfigError, DataError
from arb_ternary_testing.component import make_choice


def source(**options):
    return make_choice("data", "images", options).build()


def save(path, pixels, **how):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(path, **how)


@pytest.fixture
def folder(tmp_path):
    """Write ten images of cats and twenty of dogs, 4 x 6, each of the shade of its number."""
    for number in range(30):
        name = "cat" if number < 10 else "dog"
        save(tmp_path / "pets" / name / f"{number:02}.png", np.full((4, 6), 8 * number))
    (tmp_path / "pets" / ".hidden").write_text("passed over")
    return tmp_path / "pets"


def shades(samples):
    return {
        int(image[0, 0, 0]): int(label)
        for image, label in zip(samples.data, samples.extras["labels"], strict=True)
    }


def test_share_of_each_class_folder_is_held_out(folder):
    found = source(path=str(folder), channels=1, validation_fraction=0.2)
    assert found.classes == ("cat", "dog")
    assert found.image_shape == (1, 4, 6)
    held = shades(found.validation)
    assert sorted(held.values()) == [0] * 2 + [1] * 4
    assert shades(found.train) | held == {8 * number: int(number >= 10) for number in range(30)}
    again = source(path=str(folder), channels=1, validation_fraction=0.2)
    assert again.fingerprint() == found.fingerprint()
    assert (
        source(path=str(folder), channels=1, validation_fraction=0.3).fingerprint()
        != found.fingerprint()
    )


def test_separate_validation_folder(folder, tmp_path):
    save(tmp_path / "held" / "dog" / "a.png", np.full((4, 6), 255))
    found = source(path=str(folder), validation=str(tmp_path / "held"))
    assert found.validation.extras["labels"].tolist() == [1]
    assert len(found.train) == 30
    assert next(found.held_out(8, 1, None)).data.unique().tolist() == [1.0]
    save(tmp_path / "held" / "dogs" / "a.png", np.full((4, 6), 255))
    with pytest.raises(
        DataError,
        match=r"held/dogs: the training images have no class of this name\nDid you mean dog\?",
    ):
        source(path=str(folder), validation=str(tmp_path / "held"))
    with pytest.raises(ConfigError, match="exclude each other"):
        source(path=str(folder), validation=str(tmp_path / "held"), validation_fraction=0.5)


def test_colour_and_grey_channels(tmp_path):
    pixels = np.zeros((2, 3, 3), dtype=np.uint8)
    pixels[0, 1] = (10, 20, 30)
    pixels[1, 2] = (200, 100, 50)
    for name in "ab":
        save(tmp_path / "x" / name / "1.png", pixels)
        save(tmp_path / "x" / name / "2.png", pixels)
    colour = source(path=str(tmp_path / "x"), validation_fraction=0.5)
    assert np.array_equal(colour.train.data[0], pixels.transpose(2, 0, 1))
    grey = source(path=str(tmp_path / "x"), validation_fraction=0.5, channels=1)
    # ITU-R 601: 0.299 R + 0.587 G + 0.114 B.
    assert grey.train.data[0, 0, 1, 2] == round(0.299 * 200 + 0.587 * 100 + 0.114 * 50)


def two(tmp_path, pixels, **how):
    for name in ("a", "b"):
        for number in (1, 2):
            save(tmp_path / "two" / name / f"{number}.png", pixels, **how)
    return str(tmp_path / "two")


def test_crop_and_stretch(tmp_path):
    pixels = np.zeros((4, 8))
    pixels[:, 2:6] = 240  # the part that a crop to a square keeps
    path = two(tmp_path, pixels)
    cropped = source(path=path, image_size=4, channels=1, validation_fraction=0.5)
    assert cropped.image_shape == (1, 4, 4)
    assert np.unique(cropped.train.data).tolist() == [240]
    stretched = source(
        path=path, image_size=[4, 4], fit="stretch", channels=1, validation_fraction=0.5
    )
    assert stretched.train.data[0, 0, 0].tolist() == stretched.train.data[0, 0, 0, ::-1].tolist()
    assert stretched.train.data[0, 0, 0, 0] < 60
    assert source(path=path, image_size=[2, 6], validation_fraction=0.5).image_shape == (3, 2, 6)


def test_photograph_is_rotated_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn clockwise makes it upright
    pixels = np.zeros((2, 4))
    pixels[0, 0] = 255
    path = two(tmp_path, pixels, exif=exif)
    found = source(path=path, channels=1, validation_fraction=0.5)
    assert np.array_equal(found.train.data[0, 0], np.rot90(pixels, -1))


def test_build_names_the_file_that_is_not_an_image(folder, tmp_path):
    (folder / "cat" / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"cat/notes\.txt: not a supported image file"):
        source(path=str(folder))
    (folder / "cat" / "notes.txt").rename(folder / "notes.txt")
    with pytest.raises(DataError, match=r"notes\.txt: a file next to the folders of the classes"):
        source(path=str(folder))
    (folder / "notes.txt").rename(folder / "dog" / "99.png")
    with pytest.raises(DataError, match=r"99\.png: not an image of a supported format"):
        source(path=str(folder))
    whole = (folder / "dog" / "29.png").read_bytes()
    (folder / "dog" / "99.png").write_bytes(whole[:-30])
    with pytest.raises(DataError, match=r"99\.png: the image cannot be decoded"):
        source(path=str(folder))
    (folder / "dog" / "99.png").unlink()
    (folder / "eel").mkdir()
    with pytest.raises(DataError, match="eel: the class has no image"):
        source(path=str(folder))
    with pytest.raises(DataError, match="nowhere: no such folder"):
        source(path=str(tmp_path / "nowhere"))


def test_images_of_several_sizes_need_image_size(folder):
    save(folder / "cat" / "99.png", np.zeros((4, 7)))
    with pytest.raises(
        DataError, match=r"99\.png: 4 x 7 pixels, and images before it have 4 x 6\nSet image_size"
    ):
        source(path=str(folder))
    assert source(path=str(folder), image_size=4).image_shape == (3, 4, 4)
    with pytest.raises(ConfigError, match="image_size"):
        source(path=str(folder), image_size=[4, 4, 4])


def test_memory_is_checked_before_it_is_allocated(folder, monkeypatch):
    def taken(*_):
        raise AssertionError("memory was taken")

    monkeypatch.setattr(Image.Image, "load", taken)
    monkeypatch.setattr(np, "empty", taken)
    with pytest.raises(DataError, match=r"00\.png: 4 x 6 pixels, more than max_pixels, 20"):
        source(path=str(folder), max_pixels=20)
    with pytest.raises(DataError, match="90 megabytes are needed, more than max_megabytes, 50"):
        source(path=str(folder), image_size=1000, max_megabytes=50)


def test_pixels_of_more_than_8_bits_are_refused(tmp_path):
    for name in "ab":
        path = tmp_path / "deep" / name / "1.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(np.full((2, 2), 40000, dtype=np.uint16)).save(path)
    with pytest.raises(DataError, match=r"1\.png: pixels of mode I;16 have more than 8 bits"):
        source(path=str(tmp_path / "deep"))


def test_classes_that_are_too_small_are_refused(tmp_path):
    for name in "ab":
        save(tmp_path / "small" / name / "1.png", np.zeros((2, 2)))
    with pytest.raises(DataError, match=r"no class has enough samples to hold out 0\.1"):
        source(path=str(tmp_path / "small"))
