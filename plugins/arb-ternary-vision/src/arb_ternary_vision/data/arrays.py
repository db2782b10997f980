"""Images in arrays of numpy: .npy files, and members of .npz archives. Nothing in them is
executed.
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

from arb_ternary.config.options import option, optional, positive
from arb_ternary.errors import DataError, nearest
from arb_ternary_text.data.source import DEFAULT_FRACTION, part
from arb_ternary_vision.data.source import LABELS, LabelledSource, require_memory, split_source

if TYPE_CHECKING:
    from arb_ternary_vision.data.batches import MemorySamples

_WHERE: Final = "a .npy file, or FILE.npz:NAME for an array in an archive"
# : More classes than any data has; a bound against numbers that are no labels, each of which would
# get a name.
_CLASSES: Final = 1 << 20
#: Numbers of channels that tell an image's last dimension from its width.
_CHANNELS: Final = (1, 3)


@attrs.frozen(kw_only=True)
class ArraysConfig:
    """Options of the data source ``image_arrays``. Paths are relative to the working directory."""

    sized_samples: ClassVar[bool] = True

    images: str = option(
        help=f"{_WHERE}: [N, H, W], [N, H, W, C] or [N, C, H, W]; whole numbers from 0 to "
        f"`levels`, floats in [-1, 1]"
    )
    labels: str = option(help=f"{_WHERE}: a whole number from 0 for each image, its class")
    validation_images: str | None = option(
        None, "where the held-out images are; null = take some of `images`"
    )
    validation_labels: str | None = option(None, "where the labels of the held-out images are")
    validation_fraction: float | None = option(
        None,
        f"share of each class that is held out when `validation_images` is null (null: "
        f"{DEFAULT_FRACTION})",
        validator=optional(part),
    )
    levels: int = option(
        255, "largest whole number of a pixel, which is white; 0 is black", validator=positive
    )
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
    """The data source of ``config``.

    Raises:
        DataError: a file is missing or damaged, or an array is not what it has to be; file and
            array come first.
    """
    whole = _samples(config, config.images, config.labels)
    parts = [whole]
    if config.validation_images is not None and config.validation_labels is not None:
        parts.append(_samples(config, config.validation_images, config.validation_labels))
    count = 1 + max(int(each.extras[LABELS].max()) for each in parts)
    classes = tuple(config.classes or map(str, range(count)))
    if len(parts) == 1:
        return split_source(
            "image_arrays", classes, whole, config.validation_fraction or DEFAULT_FRACTION
        )
    return LabelledSource("image_arrays", classes, whole, parts[1])


def _samples(config: ArraysConfig, images_at: str, labels_at: str) -> MemorySamples:
    from arb_ternary_vision.data.batches import MemorySamples

    images = _in_order(
        images_at, read_array(images_at, config.max_megabytes), config.channels_first
    )
    labels = read_array(labels_at, config.max_megabytes)
    if labels.dtype.kind not in "iu" or labels.shape != (len(images),):
        raise DataError(
            f"{labels_at}: {len(images)} whole numbers are needed, one for each image of "
            f"{images_at}; there are {labels.dtype} {list(labels.shape)}"
        )
    if labels.size and not 0 <= labels.min() <= labels.max() < _CLASSES:
        raise DataError(
            f"{labels_at}: labels reach from {labels.min()} to {labels.max()}; they are places of "
            f"classes, from 0 and below {_CLASSES:,}",
            "Write the place of each image's class in the list of classes.",
        )
    lowest, highest = (-1, 1) if images.dtype.kind == "f" else (0, config.levels)
    # Not (... and ...), because every comparison with a number that is not one is false.
    if images.size and not (images.min() >= lowest and images.max() <= highest):
        raise DataError(
            f"{images_at}: pixels reach from {images.min()} to {images.max()}, outside of {lowest} "
            f"to {highest}",
            "Scale them into [-1, 1]."
            if images.dtype.kind == "f"
            else "Set levels to the value of white.",
        )
    levels = None if images.dtype.kind == "f" else config.levels
    return MemorySamples(images_at, images, {LABELS: labels.astype(np.int64)}, levels=levels)


def _in_order(where: str, images: NDArray[Any], channels_first: bool) -> NDArray[Any]:
    """Images as ``[N, C, H, W]``."""
    if images.dtype.kind not in "iuf" or images.ndim not in (3, 4):
        raise DataError(
            f"{where}: images are whole numbers or floats [N, H, W] or of four dimensions, not "
            f"{images.dtype} {list(images.shape)}"
        )
    if images.ndim == 3:
        return images[:, None]
    channels = images.shape[1 if channels_first else 3]
    if channels not in _CHANNELS:
        other = images.shape[3 if channels_first else 1]
        hint = (
            f"Set channels_first: {str(not channels_first).lower()}." if other in _CHANNELS else ""
        )
        raise DataError(
            f"{where}: {channels} channels of {list(images.shape)}; 1 or 3 are known", hint
        )
    return images if channels_first else np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def read_array(where: str, max_megabytes: int) -> NDArray[Any]:
    """The array ``where``: in a ``.npy`` file, or after a colon the name of one in a ``.npz``
    archive.

    Its header is read first: what is larger than ``max_megabytes``, or holds Python objects, is
    refused unread.

    Raises:
        DataError: there is none, or it is damaged.
    """
    try:
        with _stream(where) as stream:
            shape, dtype = _header(where, stream)
            require_memory(where, (*shape, dtype.itemsize), max_megabytes)
        with _stream(where) as stream:
            array: NDArray[Any] = npy.read_array(stream, allow_pickle=False)
            return array
    except FileNotFoundError as error:
        raise DataError(
            f"{error.filename}: no such file",
            f"Paths are relative to the working directory, {Path.cwd()}.",
        ) from error
    # RuntimeError: it is encrypted
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{where}: the array cannot be read: {error}", "The file is truncated or damaged."
        ) from error


@contextmanager
def _stream(where: str) -> Iterator[IO[bytes]]:
    """The bytes of the ``.npy`` file or of the member that ``where`` names."""
    file, colon, name = where.rpartition(":")
    if where.endswith(".npy"):
        with Path(where).open("rb") as stream:
            yield stream
    elif colon and file.endswith(".npz"):
        with zipfile.ZipFile(file) as archive:
            names = [
                member.removesuffix(".npy")
                for member in archive.namelist()
                if member.endswith(".npy")
            ]
            if name not in names:
                close = nearest(name, names)
                raise DataError(
                    f"{file}: no array {name!r} in it",
                    f"Did you mean {close}?" if close else f"It has {', '.join(names)}.",
                )
            with archive.open(f"{name}.npy") as stream:
                yield stream
    else:
        hint = f"Which array of it? {where}:NAME" if where.endswith(".npz") else ""
        raise DataError(f"{where}: images and labels are in {_WHERE}", hint)


def _header(where: str, stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise DataError(
            f"{where}: it holds Python objects, which would have to be executed",
            "Save plain numbers.",
        )
    return shape, dtype
