"""The data source ``images``."""

from __future__ import annotations

import struct
import zlib

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


def chunk(name, content):
    checksum = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)


def write_png(path, samples_HWC, depth, colour_type, *others):
    """Write a PNG file without pillow.

    Args:
        path: the file; folders are made.
        samples_HWC: samples of ``depth`` bits, 8 or 16.
        depth: bits per sample.
        colour_type: 0 grey, 2 colour, 3 palette, 4 grey and alpha, 6 colour and alpha.
        *others: chunks between the header and the samples.
    """
    height, width, _ = samples_HWC.shape
    rows = samples_HWC.astype(">u2" if depth == 16 else "u1").reshape(height, -1)
    filtered = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + b"".join(others)
        + chunk(b"IDAT", zlib.compress(filtered))
        + chunk(b"IEND", b"")
    )


def pngs(tmp_path, *written):
    """Write four files in two classes; return the folder."""
    for name in ("a", "b"):
        for number in (1, 2):
            write_png(tmp_path / "pngs" / name / f"{number}.png", *written)
    return str(tmp_path / "pngs")


#: A 16 x 16 picture with every alpha once, of one colour.
EVERY_ALPHA = np.empty((16, 16, 4), dtype=np.uint8)
EVERY_ALPHA[..., :3] = (200, 100, 50)
EVERY_ALPHA[..., 3] = np.arange(256).reshape(16, 16)


@pytest.mark.parametrize(
    ("background", "behind"),
    [
        ({}, (255, 255, 255)),
        ({"background": "white"}, (255, 255, 255)),
        ({"background": "black"}, (0, 0, 0)),
        ({"background": "#0a64C8"}, (10, 100, 200)),
    ],
)
def test_transparency_is_composited_on_the_background(tmp_path, background, behind):
    path = pngs(tmp_path, EVERY_ALPHA, 8, 6)
    found = source(path=path, validation_fraction=0.5, **background)
    alpha = EVERY_ALPHA[..., 3:] / 255
    expected = alpha * EVERY_ALPHA[..., :3] + (1 - alpha) * np.array(behind)
    # Rounded to the nearest.
    assert np.abs(found.train.data[0] - expected.transpose(2, 0, 1)).max() <= 0.51


#: A pixel that is transparent and one that is not, in every way that a PNG file can state it.
TRANSPARENT = {
    "colour and alpha": ([[[0, 0, 0, 0], [90, 90, 90, 255]]], 8, 6),
    "grey and alpha": ([[[0, 0], [90, 255]]], 8, 4),
    "one colour": ([[[1, 2, 3], [90, 90, 90]]], 8, 2, chunk(b"tRNS", struct.pack(">3H", 1, 2, 3))),
    "one grey": ([[[7], [90]]], 8, 0, chunk(b"tRNS", struct.pack(">H", 7))),
    "palette": (
        [[[0], [1]]],
        8,
        3,
        chunk(b"PLTE", bytes([0, 0, 0, 90, 90, 90])),
        chunk(b"tRNS", b"\0"),
    ),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("written", TRANSPARENT.values(), ids=TRANSPARENT)
def test_transparent_pixels_have_the_background(tmp_path, written, channels):
    samples, *how = written
    path = pngs(tmp_path, np.array(samples), *how)
    found = source(path=path, channels=channels, validation_fraction=0.5)
    assert found.train.data[0].tolist() == [[[255, 90]]] * channels
    found = source(path=path, channels=channels, validation_fraction=0.5, background="#030303")
    assert found.train.data[0].tolist() == [[[3, 90]]] * channels


def test_icons_with_black_under_the_transparency_differ(tmp_path):
    for name in ("dot", "line"):
        for number in (1, 2):
            icon = np.zeros((8, 8, 4))
            icon[(slice(3, 5) if name == "dot" else slice(0, 8)), 3:5, 3] = 255
            write_png(tmp_path / "icons" / name / f"{number}.png", icon, 8, 6)
    found = source(path=str(tmp_path / "icons"), channels=1, validation_fraction=0.5)
    black = (found.train.data == 0).reshape(2, -1).sum(axis=1)
    assert dict(zip(found.train.extras["labels"].tolist(), black, strict=True)) == {0: 4, 1: 16}


@pytest.mark.parametrize("colour_type", [4, 6])
def test_opaque_alpha_changes_no_byte(tmp_path, colour_type):
    generator = np.random.default_rng(0)
    samples = generator.integers(0, 256, (16, 16, colour_type - 2), dtype=np.uint8)
    samples[..., -1] = 255
    path = pngs(tmp_path, samples, 8, colour_type)
    found = source(path=path, validation_fraction=0.5, background="#123456").train.data[0]
    opaque = samples[..., :-1].transpose(2, 0, 1)
    assert np.array_equal(found, np.broadcast_to(opaque, (3, 16, 16)))


def test_transparent_gif(tmp_path):
    pixels = np.array([[0, 1]], dtype=np.uint8)
    for name in ("a", "b"):
        for number in (1, 2):
            file = tmp_path / "gifs" / name / f"{number}.gif"
            file.parent.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(pixels, "P")
            image.putpalette([0, 0, 0, 90, 90, 90])
            image.save(file, transparency=0)
    found = source(path=str(tmp_path / "gifs"), channels=1, validation_fraction=0.5)
    assert found.train.data[0].tolist() == [[[255, 90]]]


@pytest.mark.parametrize("wrong", ["red-ish", "#fff", "#12345g", "", 0, "white\n"])
def test_background_is_a_colour(tmp_path, wrong):
    with pytest.raises(ConfigError, match="background"):
        source(path=str(tmp_path), background=wrong)


@pytest.mark.parametrize("colour_type", [2, 4, 6])
@pytest.mark.parametrize("options", [{}, {"image_size": 2}])
def test_png_of_16_bits_per_channel_is_refused(tmp_path, colour_type, options):
    channels = {2: 3, 4: 2, 6: 4}[colour_type]
    path = pngs(tmp_path, np.full((2, 2, channels), 40000), 16, colour_type)
    with pytest.raises(DataError, match=r"a/1\.png: 16 bits per channel") as caught:
        source(path=path, validation_fraction=0.5, **options)
    assert caught.value.hint == "Convert it to 8 bits per channel."


@pytest.mark.parametrize("suffix", ["ppm", "tif"])
def test_other_formats_of_16_bits_per_channel_are_refused(tmp_path, suffix):
    samples = np.full(12, 40000, dtype=">u2").tobytes()
    # Tag, type (3 = 16-bit, 4 = 32-bit), number of values, and the value or where it is.
    tags = [
        (256, 4, 1, 2),  # width
        (257, 4, 1, 2),  # height
        (258, 3, 3, 122),  # bits per channel
        (259, 3, 1, 1 << 16),  # not compressed
        (262, 3, 1, 2 << 16),  # red, green, blue
        (273, 4, 1, 128),  # where the samples are
        (277, 3, 1, 3 << 16),  # channels
        (278, 4, 1, 2),  # rows in the strip
        (279, 4, 1, len(samples)),  # its size
    ]
    written = {
        "ppm": b"P6 2 2 65535\n" + samples,
        "tif": b"MM\0*"
        + struct.pack(">IH", 8, len(tags))
        + b"".join(struct.pack(">HHII", *tag) for tag in tags)
        + struct.pack(">I", 0)
        + struct.pack(">3H", 16, 16, 16)
        + samples,
    }
    for name in ("a", "b"):
        file = tmp_path / "deep" / name / f"1.{suffix}"
        file.parent.mkdir(parents=True)
        file.write_bytes(written[suffix])
    with Image.open(file) as opened:
        assert opened.mode == "RGB"
        assert opened.getpixel((0, 0)) == (156, 156, 156)  # 40000 / 257
    with pytest.raises(DataError, match=rf"a/1\.{suffix}: 16 bits per channel"):
        source(path=str(tmp_path / "deep"))
