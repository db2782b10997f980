"""The data source ``images``: a folder with one sub-folder of images per class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs
import numpy as np

from arb_ternary.config.options import option, optional, positive
from arb_ternary_vision.data.class_folders import (
    ClassFolders,
    ClassFoldersConfig,
    list_class_folders,
    list_validation,
)
from arb_ternary_vision.data.decode import (
    BACKGROUND,
    MAX_PIXELS,
    SUFFIXES,
    Fit,
    colour,
    decode_image,
    size_of_image,
)
from arb_ternary_vision.data.source import LABELS, LabelledSource, require_memory, split_source
from arb_ternary_vision.sizes import pair, size

if TYPE_CHECKING:
    from arb_ternary_vision.data.batches import MemorySamples

_NOUN = "image"


@attrs.frozen(kw_only=True)
class ImagesConfig(ClassFoldersConfig):
    """Options of the data source ``images``. Paths are relative to the working directory."""

    sized_samples: ClassVar[bool] = True

    image_size: int | tuple[int, int] | None = option(
        None,
        "size that images are brought to: side of squares, or [height, width], in pixels; null = "
        "all are of one size already",
        validator=optional(size),
    )
    fit: Fit = option(
        "crop",
        "how an image of another shape is changed: crop = cut off both sides, or stretch",
    )
    channels: Literal[1, 3] = option(3, "3 = colour, 1 = grey")
    background: str = option(
        BACKGROUND,
        'colour behind transparent pixels: white, black, or hexadecimal as "#rrggbb"',
        validator=colour,
    )
    max_pixels: int = option(
        MAX_PIXELS,
        "largest image in a file, in pixels; larger ones are refused before they are decoded",
        validator=positive,
    )
    max_megabytes: int = option(
        4096,
        "most memory that the images may take, one byte per pixel and channel",
        validator=positive,
    )


def build(config: ImagesConfig) -> LabelledSource:
    """Build the data source of ``config``: all images, decoded, in the order of classes and names.

    Raises:
        DataError: a folder or file is missing or cannot be used. The message begins with the path.
    """
    train = list_class_folders(Path(config.path), _NOUN, SUFFIXES)
    samples = _read(config, config.path, train)
    if config.validation is None:
        return split_source("images", train.classes, samples, config.validation_fraction)
    held_out = list_validation(config.validation, train, _NOUN, SUFFIXES)
    validation = _read(config, config.validation, held_out)
    return LabelledSource(
        name="images", classes=train.classes, train=samples, validation=validation
    )


def _read(config: ImagesConfig, name: str, listed: ClassFolders) -> MemorySamples:
    from arb_ternary_vision.data.batches import MemorySamples

    fit: Fit | None = None
    if config.image_size is None:
        height, width = size_of_image(listed.files[0], config.max_pixels)
    else:
        height, width = pair(config.image_size)
        fit = config.fit
    shape = (len(listed.files), config.channels, height, width)
    require_memory(name, shape, config.max_megabytes)
    images = np.empty(shape, dtype=np.uint8)
    for index, file in enumerate(listed.files):
        images[index] = decode_image(
            file,
            (height, width),
            config.channels,
            fit=fit,
            max_pixels=config.max_pixels,
            background=config.background,
        )
    labels = np.array(listed.labels, dtype=np.int64)
    return MemorySamples(name, images, {LABELS: labels}, levels=255)
