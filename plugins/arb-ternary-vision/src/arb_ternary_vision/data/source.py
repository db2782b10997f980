"""A data source of labelled samples: training samples, held-out samples and the names of the
classes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from arb_ternary.errors import DataError
from arb_ternary.protocols.data import Batch, BatchRequest
from arb_ternary_text.data.sampler import permutation

if TYPE_CHECKING:
    from arb_ternary_text.data.loader import SampledBatches
    from arb_ternary_vision.data.batches import MemorySamples

#: Where batches have their classes: ``Batch.extras[LABELS]``, int64 ``[B]``.
LABELS: Final = "labels"
#: Seed of the split where a source has no held-out part of its own.
_SPLIT: Final = 0


@attrs.frozen(eq=False)
class LabelledSource:
    """Images, or what a model sees as images, each of one class.

    Batches hold float32 ``[B, C, H, W]`` in [-1, 1] and, under ``labels`` of the extras, int64
    ``[B]``.

    Attributes:
        name: what listings and errors call the source.
        classes: name of each class; a label is a place in it.
        train: training samples.
        validation: held-out samples.
        prediction_noun: what reports call one sample.

    Raises:
        DataError: a label is no class, or the two parts are of different shapes.
    """

    name: str
    classes: tuple[str, ...]
    train: MemorySamples
    validation: MemorySamples
    prediction_noun: str = "image"

    #: A sample is asked one question: its class.
    predictions_per_sample = 1

    def __attrs_post_init__(self) -> None:
        for samples in (self.train, self.validation):
            if samples.data.ndim != 4 or LABELS not in samples.extras:
                raise TypeError(
                    f"{samples.name}: [N, C, H, W] and {LABELS} are needed, not "
                    f"{samples.data.shape}"
                )
            labels = samples.extras[LABELS]
            wrong = np.flatnonzero((labels < 0) | (labels >= len(self.classes)))
            if wrong.size:
                raise DataError(
                    f"{samples.name}: label {int(labels[wrong[0]])} of sample {int(wrong[0])} is "
                    f"none of the {len(self.classes)} classes, which are counted from 0"
                )
        if self.train.data.shape[1:] != self.validation.data.shape[1:]:
            raise DataError(
                f"{self.validation.name}: samples of {list(self.validation.data.shape[1:])}, and "
                f"those of {self.train.name} are of {list(self.train.data.shape[1:])}"
            )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """``(C, H, W)`` of every sample."""
        channels, height, width = self.train.data.shape[1:]
        return channels, height, width

    @property
    def vocabulary_size(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal of all samples, labels and names of classes; paths do not
        count.
        """
        parts = (self.train.digest(), self.validation.digest(), json.dumps(self.classes))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def batches(self, request: BatchRequest) -> SampledBatches:
        """Training samples; ``request.block_size`` means nothing here."""
        return self.train.batches(request)

    def samples_per_epoch(self, block_size: int) -> int:
        """Training samples."""
        return len(self.train)

    def held_out(self, batch_size: int, block_size: int, limit: int | None) -> Iterator[Batch]:
        """Held-out samples, each once."""
        return self.validation.in_order(batch_size, limit)

    def baselines(self, block_size: int) -> Mapping[str, float]:
        """The entropy of the held-out classes: the loss of who knows nothing but how frequent each
        is.
        """
        counts = np.bincount(self.validation.extras[LABELS], minlength=len(self.classes))
        shares = counts[counts > 0] / counts.sum()
        return {"class_entropy": float(-(shares * np.log(shares)).sum())}

    def attachments(self) -> Mapping[str, Any]:
        """The names of the classes, and ``[C, H, W]`` of a sample."""
        return {"classes": list(self.classes), "image_shape": list(self.image_shape)}


def split_by_class(
    labels_N: NDArray[np.int64], fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``(kept, taken)``: places of ``labels_N``, ascending; of each class the share ``fraction`` is
    taken.

    So many of a class as rounding gives, but at least one is kept. Which ones depends on ``seed``,
    the label and the number of samples of the class, on nothing else.
    """
    taken: list[int] = []
    for label in np.unique(labels_N).tolist():
        places = np.flatnonzero(labels_N == label)
        count = min(round(len(places) * fraction), len(places) - 1)
        taken.extend(places[permutation(len(places), seed, label)[:count]].tolist())
    mask = np.zeros(len(labels_N), dtype=bool)
    mask[taken] = True
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def split_source(
    name: str, classes: tuple[str, ...], whole: MemorySamples, fraction: float
) -> LabelledSource:
    """The source that holds out the share ``fraction`` of each class of ``whole``; the same ones at
    every start.

    Raises:
        DataError: the classes are too small for that.
    """
    kept, held_out = split_by_class(whole.extras[LABELS], fraction, _SPLIT)
    if not len(held_out):
        raise DataError(
            f"{whole.name}: no class has enough samples to hold out {fraction:g} of them",
            "Raise validation_fraction, or name held-out samples of their own.",
        )
    return LabelledSource(
        name,
        classes,
        whole.at(kept, f"{whole.name}, training part"),
        whole.at(held_out, f"{whole.name}, held-out part"),
    )


def require_memory(name: str, shape: tuple[int, ...], max_megabytes: int) -> None:
    """DataError where bytes of ``shape`` are more than ``max_megabytes``."""
    needed = prod(shape) / 1e6
    if needed > max_megabytes:
        raise DataError(
            f"{name}: {needed:,.0f} megabytes are needed, more than max_megabytes, "
            f"{max_megabytes:,}",
            "Take fewer or smaller images, or raise max_megabytes.",
        )
