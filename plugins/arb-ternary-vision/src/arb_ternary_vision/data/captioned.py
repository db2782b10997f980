"""The data source ``captioned``: labelled images, each with a text that a model learns to write."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import attrs
import numpy as np

from arb_ternary.config.choice import DataChoice
from arb_ternary.config.options import default_choice, option
from arb_ternary.errors import ConfigError
from arb_ternary_text.data.tokenizers import CharacterTokenizer
from arb_ternary_vision.data.source import LABELS, ImageSource, LabelledSource

if TYPE_CHECKING:
    from arb_ternary_vision.data.batches import MemorySamples

#: Key of the texts in a batch: ``Batch.extras[CAPTIONS]``, int64 ``[B, S + 1]``.
CAPTIONS: Final = "captions"
#: The character that begins and ends every text and fills up the shorter ones.
END: Final = "\n"


@attrs.frozen(kw_only=True)
class CaptionedConfig:
    """Options of the data source ``captioned``."""

    sized_samples: ClassVar[bool] = True

    images: DataChoice = default_choice("digits", "labelled images: digits, images or image_arrays")
    captions: list[str] | None = option(
        None, "the text of each class, in the order of the classes; null = the names of the classes"
    )


@attrs.frozen(eq=False, kw_only=True)
class CaptionedSource(ImageSource):
    """The images of a labelled source, each with the text of its class as characters.

    ``Batch.extras`` holds, besides the labels, int64 ``[B, S + 1]`` under ``captions``: a text
    between two ends, filled up with ends. ``S`` characters are predicted per image; a masking
    strategy leaves out the filling.

    Attributes:
        images: the labelled source.
        captions: the text of each class.
        tokenizer: its characters, ends included.
    """

    images: LabelledSource
    captions: tuple[str, ...]
    tokenizer: CharacterTokenizer

    prediction_noun = "character"

    @property
    def predictions_per_sample(self) -> int:
        """Characters of the longest text, and its end."""
        return max(map(len, self.captions)) + 1

    @property
    def vocabulary_size(self) -> int:
        """Number of characters."""
        return self.tokenizer.vocabulary_size

    def fingerprint(self) -> str:
        """Return the SHA-256 in hexadecimal of images, labels and texts."""
        content = f"{self.images.fingerprint()}\n{json.dumps(self.captions)}"
        return hashlib.sha256(content.encode()).hexdigest()

    def attachments(self) -> Mapping[str, Any]:
        """Return the attachments of the images, the texts, and the tokenizer."""
        return {
            **self.images.attachments(),
            "captions": list(self.captions),
            "tokenizer": self.tokenizer.to_json(),
        }


def build(config: CaptionedConfig) -> CaptionedSource:
    """Build the data source of ``config``.

    Raises:
        ConfigError: the images have no labels, the number of texts is not that of the classes, or a
            text has the character that ends texts.
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
            "Give one text per class, in this order.",
        )
    for text in captions:
        if END in text:
            raise ConfigError(f"data.captions: {text!r} has a line break, which ends a text")
    return add_captions(images, captions)


def add_captions(images: LabelledSource, captions: tuple[str, ...]) -> CaptionedSource:
    """Return the source of ``images`` and the text of each class."""
    tokenizer = CharacterTokenizer.from_text(END + "".join(captions))
    # The longest text has one end before it and one after it.
    length = max(map(len, captions)) + 2
    texts = [tokenizer.encode((END + text).ljust(length, END)) for text in captions]
    ids = np.array(texts, dtype=np.int64)

    def with_captions(samples: MemorySamples) -> MemorySamples:
        extras = {**samples.extras, CAPTIONS: ids[samples.extras[LABELS]]}
        return attrs.evolve(samples, extras=extras)

    return CaptionedSource(
        name=f"{images.name}, captioned",
        train=with_captions(images.train),
        validation=with_captions(images.validation),
        images=images,
        captions=captions,
        tokenizer=tokenizer,
    )
