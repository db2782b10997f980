"""Decode image files with pillow.

Files are not trusted: their claims are checked before memory is allocated for them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from numpy.typing import NDArray

from arb_ternary.config.options import Rule
from arb_ternary.errors import DataError

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

Fit = Literal["crop", "stretch"]

_COLOUR: Final = "white|black|#[0-9a-fA-F]{6}"

#: Suffixes of the files that are read. Every format is tried on each of them.
SUFFIXES: Final = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
#: Default of the largest image that is decoded, in pixels.
MAX_PIXELS: Final = 50_000_000
_FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
#: Modes of pillow with more than 8 bits per pixel, which its conversion would cut off.
_DEEP_MODES: Final = ("I", "F")
#: First bytes of a PNG file: its signature, and length and name of the header, whose ninth byte is
#: the bit depth.
_PNG_HEADER: Final = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR"
_PNG_DEPTH: Final = len(_PNG_HEADER) + 8
#: The tag of a TIFF file's bits per channel.
_BITS: Final = 258
#: Colour behind transparent pixels by default.
BACKGROUND: Final = "white"
#: Validator of such a colour.
colour: Final = Rule(
    "white, black, or a colour as #rrggbb",
    lambda value: isinstance(value, str) and re.fullmatch(_COLOUR, value) is not None,
    {"pattern": f"^({_COLOUR})$"},
)
#: The tag of an image's orientation, and its values that exchange rows and columns (Exif 2.32,
#: 4.6.4).
_ORIENTATION: Final = 0x0112
_TRANSPOSED: Final = (5, 6, 7, 8)


def decode_image(
    file: Path,
    size: tuple[int, int],
    channels: int,
    *,
    fit: Fit | None,
    max_pixels: int,
    background: str = BACKGROUND,
) -> NDArray[np.uint8]:
    """Read an image as uint8 ``[C, H, W]``, upright by its Exif orientation.

    Of an animation the first frame is read.

    Args:
        file: the file.
        size: ``(H, W)``.
        channels: 1 is the luminance, 3 are red, green and blue.
        fit: how an image of another size is changed; None = it is refused.
        max_pixels: larger images are refused before they are decoded.
        background: colour behind transparent pixels.

    Raises:
        DataError: the file cannot be read, is damaged, too large, of another size, or has more than
            8 bits per channel.
    """
    from PIL import Image, ImageOps

    height, width = size
    try:
        with _open(file, max_pixels) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.has_transparency_data:
                behind = Image.new("RGBA", image.size, background)
                image = Image.alpha_composite(behind, image.convert("RGBA"))
            image = image.convert("L" if channels == 1 else "RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(
            f"{file}: the image cannot be decoded: {error}", "It is truncated or damaged."
        ) from error
    if fit is None and image.size != (width, height):
        raise DataError(
            f"{file}: {image.size[1]} x {image.size[0]} pixels, and images before it have "
            f"{height} x {width}",
            f"Set image_size: [{height}, {width}].",
        )
    if fit == "crop":
        image = ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
    elif fit == "stretch":
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def size_of_image(file: Path, max_pixels: int) -> tuple[int, int]:
    """Read height and width of an image, upright.

    Raises:
        DataError: the file cannot be read, or the image is too large.
    """
    with _open(file, max_pixels) as image:
        width, height = image.size
        if image.getexif().get(_ORIENTATION, 1) in _TRANSPOSED:
            return width, height
        return height, width


def _open(file: Path, max_pixels: int) -> ImageFile:
    """Open the image in ``file`` and read its header only."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(file, formats=_FORMATS)
    except UnidentifiedImageError as error:
        raise DataError(
            f"{file}: not an image of a supported format",
            f"Supported are {', '.join(_FORMATS)}.",
        ) from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{file}: the image cannot be read: {error}") from error
    width, height = image.size
    mode = image.mode
    if width * height > max_pixels:
        image.close()
        raise DataError(
            f"{file}: {height} x {width} pixels, more than max_pixels, {max_pixels:,}",
            "Make it smaller, or raise max_pixels if you trust the file.",
        )
    if mode.partition(";")[0] in _DEEP_MODES:
        image.close()
        raise DataError(
            f"{file}: pixels of mode {mode} have more than 8 bits",
            "Convert it to 8 bits per channel.",
        )
    depth = _bits_per_channel(file, image)
    if depth > 8:
        image.close()
        raise DataError(
            f"{file}: {depth} bits per channel, of which only the upper 8 can be read",
            "Convert it to 8 bits per channel.",
        )
    return image


def _bits_per_channel(file: Path, image: ImageFile) -> int:
    """Return the bits per channel that the header of a file states; 8 if its format has no more.

    The mode of an image does not tell: pillow cuts the channels of several formats to 8 bits.
    """
    from PIL.TiffImagePlugin import TiffImageFile

    if image.format == "PNG":
        with file.open("rb") as opened:
            header = opened.read(_PNG_DEPTH + 1)
        is_whole = len(header) > _PNG_DEPTH and header.startswith(_PNG_HEADER)
        return header[_PNG_DEPTH] if is_whole else 8
    if isinstance(image, TiffImageFile):
        bits: tuple[int, ...] = image.tag_v2.get(_BITS, (1,))
        return max(bits)
    if image.format == "PPM":
        # The arguments of pillow's decoder are the mode and, if it is not 255, the largest value.
        arguments = image.tile[0].args
        return 16 if isinstance(arguments, tuple) and arguments[1] > 255 else 8
    return 8
