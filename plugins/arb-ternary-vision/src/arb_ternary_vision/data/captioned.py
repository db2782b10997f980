"""Labelled images with a text each, to learn to write it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import numpy as np

from arb_ternary.config.choice import DataChoice
from arb_ternary.config.options import default_choice, option
from arb_ternary.errors import ConfigError
from arb_ternary.protocols.data import Batch, BatchRequest
from arb_ternary_text.data.tokenizers import CharacterTokenizer
from arb_ternary_vision.data.source import LABELS, LabelledSource

if TYPE_CHECKING:
    from arb_ternary_text.data.loader import SampledBatches
    from arb_ternary_vision.data.batches import MemorySamples

#: Where batches have their texts: ``Batch.extras[CAPTIONS]``, int64 ``[B, S + 1]``.
CAPTIONS = "captions"
#: Begins and ends every text, and fills up the shorter ones.
END = "\n"


@attrs.frozen(kw_only=True)
class CaptionedConfig:
    """Options of the data source ``captioned``."""

    #: See ``arb_ternary_train.protocols.SizedSamples``.
    sized_samples: ClassVar[bool] = True

    images: DataChoice = default_choice("digits", "labelled images: digits, images or image_arrays")
    captions: list[str] | None = option(
        None, "the text of each class, in the order of the classes; null = the names of the classes"
    )


@attrs.frozen(eq=False)
class CaptionedSource:
    """The images of a labelled source, and the text of the class of each, written in characters.

    ``Batch.extras`` has, beside the labels, int64 ``[B, S + 1]`` under ``captions``: a text between
    two ends, filled up with ends. Of each image ``S`` characters are asked for; a masking strategy
    leaves the filling out.

    Attributes:
        images: the labelled source.
        captions: the text of each class.
        tokenizer: its characters, ends included.
    """

    images: LabelledSource
    captions: tuple[str, ...]
    tokenizer: CharacterTokenizer
    train: MemorySamples = attrs.field(init=False)
    validation: MemorySamples = attrs.field(init=False)

    prediction_noun = "character"

    def __attrs_post_init__(self) -> None:
        length = self.predictions_per_sample + 1
        texts = [self.tokenizer.encode((END + text).ljust(length, END)) for text in self.captions]
        written = np.array(texts, dtype=np.int64)
        for part in ("train", "validation"):
            samples: MemorySamples = getattr(self.images, part)
            extras = {**samples.extras, CAPTIONS: written[samples.extras[LABELS]]}
            object.__setattr__(self, part, attrs.evolve(samples, extras=extras))

    @property
    def name(self) -> str:
        """That of the labelled source, with its texts."""
        return f"{self.images.name}, captioned"

    @property
    def predictions_per_sample(self) -> int:
        """Characters of the longest text, and its end."""
        return max(map(len, self.captions)) + 1

    @property
    def vocabulary_size(self) -> int:
        """Number of characters."""
        return self.tokenizer.vocabulary_size

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """``(C, H, W)`` of every image."""
        return self.images.image_shape

    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal of images, labels and texts."""
        return hashlib.sha256(
            f"{self.images.fingerprint()}\n{json.dumps(self.captions)}".encode()
        ).hexdigest()

    def batches(self, request: BatchRequest) -> SampledBatches:
        """Training samples; ``request.block_size`` means nothing here."""
        return self.train.batches(request)

    def samples_per_epoch(self, block_size: int) -> int:
        """Training images."""
        return len(self.train)

    def held_out(self, batch_size: int, block_size: int, limit: int | None) -> Iterator[Batch]:
        """Held-out samples, each once."""
        return self.validation.in_order(batch_size, limit)

    def attachments(self) -> Mapping[str, Any]:
        """Those of the images, the texts, and the tokenizer of their characters."""
        return {
            **self.images.attachments(),
            "captions": list(self.captions),
            "tokenizer": self.tokenizer.to_json(),
        }


def build(config: CaptionedConfig) -> CaptionedSource:
    """The data source of ``config``.

    Raises:
        ConfigError: the images have no labels, there are more or fewer texts than classes, or one
            has the character that ends texts.
    """
    images = config.images.build()
    if not isinstance(images, LabelledSource):
        raise ConfigError(
            f"data.images: {config.images.name!r} has no labelled images",
            "Use digits, images or image_arrays.",
        )
    captions = images.classes if config.captions is None else tuple(config.captions)
    if len(captions) != len(images.classes):
        raise ConfigError(
            f"data.captions: {len(captions)} texts, and {config.images.name!r} has "
            f"{len(images.classes)} classes: {', '.join(images.classes)}",
            "Give one for each, in this order.",
        )
    if wrong := [text for text in captions if END in text]:
        raise ConfigError(f"data.captions: {wrong[0]!r} has a line break, which ends a text")
    return CaptionedSource(images, captions, CharacterTokenizer.from_text(END + "".join(captions)))
