"""The data source ``image_arrays``: numpy arrays in .npy files or .npz archives.

Nothing in the files is executed.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Final

import attrs
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from arb_ternary.config.options import option, positive
from arb_ternary.errors import DataError, nearest
from arb_ternary_vision.data.source import (
    LABELS,
    LabelledSource,
    fraction_option,
    require_memory,
    split_source,
)

if TYPE_CHECKING:
    from arb_ternary_vision.data.batches import MemorySamples

_WHERE: Final = "a .npy file, or FILE.npz:NAME for an array in an archive"
#: More classes than any data has. It is a bound against numbers that are not labels, because each
#: class gets a name.
_MAX_CLASSES: Final = 1 << 20
#: Numbers of channels that tell an image's last dimension from its width.
_CHANNELS: Final = (1, 3)


@attrs.frozen(kw_only=True)
class ArraysConfig:
    """Options of the data source ``image_arrays``. Paths are relative to the working directory."""

    sized_samples: ClassVar[bool] = True

    images: str = option(
        help=f"{_WHERE}: [N, H, W], [N, H, W, C] or [N, C, H, W]; integers from 0 to `levels`, or "
        f"floats in [-1, 1]"
    )
    labels: str = option(help=f"{_WHERE}: the class of each image, an integer from 0")
    validation_images: str | None = option(
        None, "the held-out images; null = hold out some of `images`"
    )
    validation_labels: str | None = option(None, "the labels of the held-out images")
    validation_fraction: float | None = fraction_option("validation_images")
    levels: int = option(255, "the integer that is white; 0 is black", validator=positive)
    channels_first: bool = option(
        False, "images of four dimensions are [N, C, H, W]; false = [N, H, W, C]"
    )
    classes: list[str] | None = option(
        None, "names of the classes, in the order of their numbers; null = the numbers"
    )
    max_megabytes: int = option(
        4096,
        "most memory that an array may take; larger ones are refused before they are read",
        validator=positive,
    )

    def __attrs_post_init__(self) -> None:
        if (self.validation_images is None) != (self.validation_labels is None):
            raise ValueError(
                "validation_images and validation_labels belong together: give both or none"
            )
        if self.validation_images is not None and self.validation_fraction is not None:
            raise ValueError(
                "validation_images and validation_fraction exclude each other: give one of them"
            )
        if self.validation_images == self.images:
            raise ValueError(
                "'validation_images' are the training images; null holds some of them out"
            )
        if self.classes is not None and len(set(self.classes)) < len(self.classes):
            raise ValueError(f"'classes' has a name twice: {', '.join(self.classes)}")


def build(config: ArraysConfig) -> LabelledSource:
    """Build the data source of ``config``.

    Raises:
        DataError: a file is missing or damaged, or an array cannot be used. The message begins with
            the file and the array.
    """
    train = _samples(config, config.images, config.labels)
    highest = int(train.extras[LABELS].max())
    validation = None
    if config.validation_images is not None and config.validation_labels is not None:
        validation = _samples(config, config.validation_images, config.validation_labels)
        highest = max(highest, int(validation.extras[LABELS].max()))
    classes = tuple(config.classes or map(str, range(highest + 1)))
    if validation is None:
        return split_source("image_arrays", classes, train, config.validation_fraction)
    return LabelledSource(name="image_arrays", classes=classes, train=train, validation=validation)


def _samples(config: ArraysConfig, images_at: str, labels_at: str) -> MemorySamples:
    from arb_ternary_vision.data.batches import MemorySamples

    images = read_array(images_at, config.max_megabytes)
    images = _channels_first(images_at, images, config.channels_first)
    labels = read_array(labels_at, config.max_megabytes)
    if labels.dtype.kind not in "iu" or labels.shape != (len(images),):
        raise DataError(
            f"{labels_at}: must be {len(images)} integers, one for each image of {images_at}, not "
            f"{labels.dtype} {list(labels.shape)}"
        )
    if labels.size and not 0 <= labels.min() <= labels.max() < _MAX_CLASSES:
        raise DataError(
            f"{labels_at}: labels must be from 0 to {_MAX_CLASSES - 1:,}; they are from "
            f"{labels.min()} to {labels.max()}",
            "Write the index of each image's class in the list of classes.",
        )
    labels = labels.astype(np.int64)
    if images.dtype.kind == "f":
        _check_range(images_at, images, -1, 1, "Scale them into [-1, 1].")
        return MemorySamples(images_at, images, {LABELS: labels})
    _check_range(images_at, images, 0, config.levels, "Set levels to the value of white.")
    return MemorySamples(images_at, images, {LABELS: labels}, levels=config.levels)


def _check_range(where: str, images: NDArray[Any], low: int, high: int, remedy: str) -> None:
    if not images.size:
        return
    lowest = images.min()
    highest = images.max()
    # Written with `not` because a comparison with NaN is false.
    if not (lowest >= low and highest <= high):
        raise DataError(
            f"{where}: pixels must be from {low} to {high}; they are from {lowest} to {highest}",
            remedy,
        )


def _channels_first(where: str, images: NDArray[Any], channels_first: bool) -> NDArray[Any]:
    """Return images as ``[N, C, H, W]``."""
    if images.dtype.kind not in "iuf" or images.ndim not in (3, 4):
        raise DataError(
            f"{where}: images must be integers or floats of three or four dimensions, not "
            f"{images.dtype} {list(images.shape)}"
        )
    if images.ndim == 3:
        return images[:, None]
    first = images.shape[1]
    last = images.shape[3]
    channels = first if channels_first else last
    if channels not in _CHANNELS:
        other = last if channels_first else first
        remedy = ""
        if other in _CHANNELS:
            remedy = f"Set channels_first: {str(not channels_first).lower()}."
        raise DataError(
            f"{where}: {channels} channels of {list(images.shape)}; they must be 1 or 3", remedy
        )
    return images if channels_first else np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def read_array(where: str, max_megabytes: int) -> NDArray[Any]:
    """Read an array: a ``.npy`` file, or, after a colon, the name of one in a ``.npz`` archive.

    The header is read first. An array that is larger than ``max_megabytes``, or holds Python
    objects, is refused unread.

    Raises:
        DataError: there is no such array, or it is damaged.
    """
    try:
        with _open(where) as stream:
            shape, dtype = _read_header(where, stream)
            require_memory(where, (*shape, dtype.itemsize), max_megabytes)
        with _open(where) as stream:
            array: NDArray[Any] = npy.read_array(stream, allow_pickle=False)
            return array
    except FileNotFoundError as error:
        raise DataError(
            f"{error.filename}: no such file",
            f"Paths are relative to the working directory, {Path.cwd()}.",
        ) from error
    # RuntimeError: the archive is encrypted.
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{where}: the array cannot be read: {error}", "The file is truncated or damaged."
        ) from error


@contextmanager
def _open(where: str) -> Iterator[IO[bytes]]:
    """Open the ``.npy`` file, or the member of an archive, that ``where`` names."""
    file, colon, name = where.rpartition(":")
    if where.endswith(".npy"):
        with Path(where).open("rb") as stream:
            yield stream
    elif colon and file.endswith(".npz"):
        with zipfile.ZipFile(file) as archive:
            members = [member for member in archive.namelist() if member.endswith(".npy")]
            names = [member.removesuffix(".npy") for member in members]
            if name not in names:
                close = nearest(name, names)
                raise DataError(
                    f"{file}: the archive has no array {name!r}",
                    f"Did you mean {close}?" if close else f"It has {', '.join(names)}.",
                )
            with archive.open(f"{name}.npy") as stream:
                yield stream
    else:
        remedy = f"Name an array of the archive: {where}:NAME" if where.endswith(".npz") else ""
        raise DataError(f"{where}: not {_WHERE}", remedy)


def _read_header(where: str, stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise DataError(
            f"{where}: the array holds Python objects, which would have to be executed",
            "Save plain numbers.",
        )
    return shape, dtype
