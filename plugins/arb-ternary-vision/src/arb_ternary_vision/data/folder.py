"""Images in folders, one a class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from arb_ternary.config.options import option, optional, positive
from arb_ternary.errors import DataError, nearest
from arb_ternary_text.data.source import DEFAULT_FRACTION, part
from arb_ternary_vision.data.source import LABELS, LabelledSource, require_memory, split_source
from arb_ternary_vision.sizes import pair, size

if TYPE_CHECKING:
    from PIL.Image import Image

    from arb_ternary_vision.data.batches import MemorySamples

#: Endings of files that are read, and the formats that are tried on them, whatever they are called.
_ENDINGS: Final = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
_FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
#: Modes of pillow whose pixels hold more than 8 bits, which its conversion would cut off.
_DEEP: Final = ("I", "F")
#: Largest image that is decoded where nobody says otherwise, in pixels.
MAX_PIXELS: Final = 50_000_000
# : The tag of an image's orientation, and its values where rows and columns are exchanged (Exif
# 2.32, 4.6.4).
_ORIENTATION = 0x0112
_LYING = (5, 6, 7, 8)


@attrs.frozen(kw_only=True)
class FolderConfig:
    """Options of the data source ``images``. Paths are relative to the working directory."""

    sized_samples: ClassVar[bool] = True

    path: str = option(
        help="folder with one folder of images a class; the names of those are the classes"
    )
    validation: str | None = option(
        None, "such a folder with the held-out images; null = take them from `path`"
    )
    validation_fraction: float | None = option(
        None,
        f"share of the images of each class that is held out when `validation` is null (null: "
        f"{DEFAULT_FRACTION})",
        validator=optional(part),
    )
    image_size: int | tuple[int, int] | None = option(
        None,
        "what images are made: side of squares, or [height, width], in pixels; null = all are of "
        "one size already",
        validator=optional(size),
    )
    fit: Literal["crop", "stretch"] = option(
        "crop",
        "of images of another shape: crop = cut off what reaches over, on both sides; stretch",
    )
    channels: Literal[1, 3] = option(3, "3 = colour, 1 = grey")
    max_pixels: int = option(
        MAX_PIXELS,
        "largest image in a file, in pixels; larger ones are refused before they are decoded",
        validator=positive,
    )
    max_megabytes: int = option(
        4096,
        "most memory that the images may take, a byte for each pixel and channel",
        validator=positive,
    )

    def __attrs_post_init__(self) -> None:
        if self.validation is not None and self.validation_fraction is not None:
            raise ValueError(
                "validation and validation_fraction exclude each other: give one of them"
            )


def build(config: FolderConfig) -> LabelledSource:
    """The data source of ``config``: all images, decoded, in the order of classes and file names.

    Raises:
        DataError: a folder or a file is missing or not what it has to be; its path comes first.
    """
    classes, files = find_images(Path(config.path))
    whole = _read(config, config.path, files)
    if config.validation is None:
        return split_source(
            "images", classes, whole, config.validation_fraction or DEFAULT_FRACTION
        )
    if Path(config.validation).resolve() == Path(config.path).resolve():
        raise DataError(
            f"{config.validation}: the held-out images are the training images",
            "null holds some out.",
        )
    held_out_classes, held_out_files = find_images(Path(config.validation))
    if unknown := sorted(set(held_out_classes) - set(classes)):
        close = nearest(unknown[0], classes)
        raise DataError(
            f"{Path(config.validation) / unknown[0]}: no class of the training images is called so",
            f"Did you mean {close}?" if close else f"Classes are: {', '.join(classes)}.",
        )
    renumbered = [(file, classes.index(held_out_classes[label])) for file, label in held_out_files]
    return LabelledSource("images", classes, whole, _read(config, config.validation, renumbered))


def find_images(folder: Path) -> tuple[tuple[str, ...], list[tuple[Path, int]]]:
    """Classes and images of a folder of folders: each file with the place of its class, in the
    order of names.

    Names that begin with a dot are passed over.

    Raises:
        DataError: there is no such folder, no class in it, a class without an image, or a file that
            is none.
    """
    if not folder.is_dir():
        raise DataError(
            f"{folder}: no such folder",
            f"Paths are relative to the working directory, {Path.cwd()}.",
        )
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    if strays := [entry for entry in entries if not entry.is_dir()]:
        raise DataError(
            f"{strays[0]}: a file beside the folders of the classes",
            "Move it into the folder of its class, or away.",
        )
    if not entries:
        raise DataError(
            f"{folder}: no folder of a class in it",
            f"Images lie in {folder / 'CLASS' / 'NAME.png'}.",
        )
    files: list[tuple[Path, int]] = []
    for label, entry in enumerate(entries):
        found = sorted(file for file in entry.iterdir() if not file.name.startswith("."))
        if wrong := [
            file for file in found if file.suffix.lower() not in _ENDINGS or not file.is_file()
        ]:
            raise DataError(
                f"{wrong[0]}: not an image by its name",
                f"Endings are: {', '.join(sorted(_ENDINGS))}; move it away.",
            )
        if not found:
            raise DataError(
                f"{entry}: the class has no image", "Give it some, or remove the folder."
            )
        files.extend((file, label) for file in found)
    return tuple(entry.name for entry in entries), files


def _read(config: FolderConfig, name: str, files: list[tuple[Path, int]]) -> MemorySamples:
    from arb_ternary_vision.data.batches import MemorySamples

    size = _size_of(config, files[0][0])
    require_memory(name, (len(files), config.channels, *size), config.max_megabytes)
    images = np.empty((len(files), config.channels, *size), dtype=np.uint8)
    for place, (file, _) in enumerate(files):
        images[place] = decoded(
            file,
            size,
            config.channels,
            fit=config.fit if config.image_size is not None else None,
            max_pixels=config.max_pixels,
        )
    labels = np.array([label for _, label in files], dtype=np.int64)
    return MemorySamples(name, images, {LABELS: labels}, levels=255)


def _size_of(config: FolderConfig, first: Path) -> tuple[int, int]:
    """Height and width of every image: what the config says, or those of the first."""
    if config.image_size is None:
        with _opened(first, config.max_pixels) as image:
            width, height = image.size
            return (
                (width, height)
                if image.getexif().get(_ORIENTATION, 1) in _LYING
                else (height, width)
            )
    return pair(config.image_size)


def decoded(
    file: Path,
    size: tuple[int, int],
    channels: int,
    *,
    fit: Literal["crop", "stretch"] | None,
    max_pixels: int,
) -> NDArray[np.uint8]:
    """An image as uint8 ``[C, H, W]``, turned upright as its camera says; of an animation the first
    picture.

    Args:
        file: where it is.
        size: ``(H, W)``.
        channels: 1 is the luminance, 3 are red, green and blue; transparency is left out.
        fit: how it is made that size; None: it has to be of that size.
        max_pixels: larger images are refused before they are decoded.

    Raises:
        DataError: it cannot be read, is damaged, too large, or of another size.
    """
    from PIL import Image, ImageOps

    height, width = size
    try:
        with _opened(file, max_pixels) as opened:
            upright = ImageOps.exif_transpose(opened).convert("L" if channels == 1 else "RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(
            f"{file}: the image cannot be decoded: {error}", "It is truncated or damaged."
        ) from error
    if fit is None and upright.size != (width, height):
        raise DataError(
            f"{file}: {upright.size[1]} x {upright.size[0]} pixels, and images before it have "
            f"{height} x {width}",
            f"Set image_size: [{height}, {width}].",
        )
    if fit == "crop":
        upright = ImageOps.fit(upright, (width, height), Image.Resampling.LANCZOS)
    elif fit == "stretch":
        upright = upright.resize((width, height), Image.Resampling.LANCZOS)
    pixels = np.asarray(upright, dtype=np.uint8)
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _opened(file: Path, max_pixels: int) -> Image:
    """The image of ``file``, of which only the header has been read."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(file, formats=_FORMATS)
    except UnidentifiedImageError as error:
        raise DataError(
            f"{file}: not an image of a format that is read", f"Those are {', '.join(_FORMATS)}."
        ) from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{file}: the image cannot be read: {error}") from error
    if image.size[0] * image.size[1] > max_pixels:
        image.close()
        raise DataError(
            f"{file}: {image.size[1]} x {image.size[0]} pixels, more than max_pixels, "
            f"{max_pixels:,}",
            "Make it smaller, or raise max_pixels if you trust the file.",
        )
    if image.mode.partition(";")[0] in _DEEP:
        mode = image.mode
        image.close()
        raise DataError(
            f"{file}: pixels of mode {mode} hold more than 8 bits",
            "Convert it to 8 bits a channel.",
        )
    return image
