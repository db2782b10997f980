"""Data sources of images in memory, and how their samples are held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from arb_ternary.config.options import option, optional
from arb_ternary.errors import DataError
from arb_ternary.protocols.data import Batch, BatchRequest
from arb_ternary_text.data.sampler import permutation
from arb_ternary_text.data.source import DEFAULT_FRACTION, part

if TYPE_CHECKING:
    from arb_ternary_text.data.loader import SampledBatches
    from arb_ternary_vision.data.batches import MemorySamples

#: Key of the classes in a batch: ``Batch.extras[LABELS]``, int64 ``[B]``.
LABELS: Final = "labels"
#: Seed of the split into training and held-out samples.
SPLIT_SEED: Final = 0
#: Share of the training samples that is held out for choosing settings, and the seed of that split.
TUNING_FRACTION: Final = 0.2
TUNING_SEED: Final = 1


def fraction_option(key: str) -> Any:
    """Return the option ``validation_fraction`` of a source whose option ``key`` names samples."""
    return option(
        None,
        f"share of the samples of each class that is held out when `{key}` is null (null: "
        f"{DEFAULT_FRACTION})",
        validator=optional(part),
    )


def tuning_option(noun: str) -> Any:
    """Return the option ``tuning`` of a source of ``noun``s."""
    return option(
        False,
        f"validate on a fifth of the training {noun}s and train on the rest, to choose settings; "
        f"the held-out {noun}s stay unseen",
        validator=attrs.validators.instance_of(bool),
    )


@attrs.frozen(eq=False, kw_only=True)
class ImageSource:
    """Images, or samples that a model reads as images, in memory.

    Batches hold float32 ``[B, C, H, W]`` in [-1, 1].

    Attributes:
        name: name of the source in listings and errors.
        train: training samples.
        validation: held-out samples.
    """

    name: str
    train: MemorySamples
    validation: MemorySamples

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """``(C, H, W)`` of every sample."""
        channels, height, width = self.train.data.shape[1:]
        return channels, height, width

    def batches(self, request: BatchRequest) -> SampledBatches:
        """Return batches of training samples; ``request.block_size`` is ignored."""
        return self.train.batches(request)

    def samples_per_epoch(self, block_size: int) -> int:
        """Return the number of training samples."""
        return len(self.train)

    def held_out(self, batch_size: int, block_size: int, limit: int | None) -> Iterator[Batch]:
        """Yield batches of the held-out samples, each sample once."""
        return self.validation.in_order(batch_size, limit)


@attrs.frozen(eq=False, kw_only=True)
class LabelledSource(ImageSource):
    """Images of one class each; batches hold the classes, int64 ``[B]``, as the extra ``labels``.

    Attributes:
        classes: name of each class; a label is an index into it.
        prediction_noun: what reports call one sample.

    Raises:
        DataError: a label is not a class, or the two parts are of different shapes.
    """

    classes: tuple[str, ...]
    prediction_noun: str = "image"

    #: The model predicts one class per sample.
    predictions_per_sample = 1

    def __attrs_post_init__(self) -> None:
        for samples in (self.train, self.validation):
            labels = samples.extras[LABELS]
            wrong = np.flatnonzero((labels < 0) | (labels >= len(self.classes)))
            if wrong.size:
                raise DataError(
                    f"{samples.name}: label {int(labels[wrong[0]])} of sample {int(wrong[0])} is "
                    f"none of the {len(self.classes)} classes, which are counted from 0"
                )
        train_shape = list(self.train.data.shape[1:])
        validation_shape = list(self.validation.data.shape[1:])
        if train_shape != validation_shape:
            raise DataError(
                f"{self.validation.name}: samples are of {validation_shape}, and those of "
                f"{self.train.name} are of {train_shape}"
            )

    @property
    def vocabulary_size(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def fingerprint(self) -> str:
        """Return the SHA-256 in hexadecimal of all samples, labels and names of classes.

        It does not depend on paths.
        """
        parts = (self.train.digest(), self.validation.digest(), json.dumps(self.classes))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def baselines(self, block_size: int) -> Mapping[str, float]:
        """Return the entropy of the held-out classes.

        It is the loss of a predictor that knows only how frequent each class is.
        """
        counts = np.bincount(self.validation.extras[LABELS], minlength=len(self.classes))
        shares = counts[counts > 0] / counts.sum()
        return {"class_entropy": float(-(shares * np.log(shares)).sum())}

    def attachments(self) -> Mapping[str, Any]:
        """Return the names of the classes, and ``[C, H, W]`` of a sample."""
        return {"classes": list(self.classes), "image_shape": list(self.image_shape)}


def split_by_class(
    labels_N: NDArray[np.int64], fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Take the share ``fraction`` of each class.

    The number of samples taken from a class is rounded, and at least one is kept. Which ones are
    taken depends only on ``seed``, the label and the number of samples of the class.

    Returns:
        ``(kept, taken)``: indices into ``labels_N``, ascending.
    """
    taken: list[int] = []
    for label in np.unique(labels_N).tolist():
        members = np.flatnonzero(labels_N == label)
        count = min(round(len(members) * fraction), len(members) - 1)
        taken.extend(members[permutation(len(members), seed, label)[:count]].tolist())
    mask = np.zeros(len(labels_N), dtype=bool)
    mask[taken] = True
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def hold_out(
    name: str, labels_N: NDArray[np.int64], fraction: float | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split samples into those for training and those for validation; the same at every start.

    Args:
        name: name of the samples in error messages.
        labels_N: their classes.
        fraction: share of each class that is held out; None = the default.

    Returns:
        ``(kept, held_out)``: indices into ``labels_N``, ascending.

    Raises:
        DataError: every class is too small for that.
    """
    if fraction is None:
        fraction = DEFAULT_FRACTION
    kept, held_out = split_by_class(labels_N, fraction, SPLIT_SEED)
    if not len(held_out):
        raise DataError(
            f"{name}: no class has enough samples to hold out {fraction:g} of them",
            "Add samples, raise validation_fraction, or name samples for validation.",
        )
    return kept, held_out


def split_source(
    name: str, classes: tuple[str, ...], whole: MemorySamples, fraction: float | None
) -> LabelledSource:
    """Return the source that holds out the share ``fraction`` of each class of ``whole``.

    Raises:
        DataError: every class is too small for that.
    """
    kept, held_out = hold_out(whole.name, whole.extras[LABELS], fraction)
    train = whole.take(kept, f"{whole.name}, training part")
    validation = whole.take(held_out, f"{whole.name}, held-out part")
    return LabelledSource(name=name, classes=classes, train=train, validation=validation)


def require_memory(name: str, shape: tuple[int, ...], max_megabytes: int) -> None:
    """Check that ``shape`` bytes are at most ``max_megabytes``.

    Raises:
        DataError: they are more.
    """
    needed = prod(shape) / 1e6
    if needed > max_megabytes:
        raise DataError(
            f"{name}: {needed:,.0f} megabytes are needed, more than max_megabytes, "
            f"{max_megabytes:,}",
            "Use fewer or smaller images, or raise max_megabytes.",
        )
