"""The data source ``digits``: 1,797 real handwritten digits of 8 x 8 pixels in 17 grey levels.

They are the test set of *Optical Recognition of Handwritten Digits* (E. Alpaydin, C. Kaynak, UCI
Machine Learning Repository, 1998, doi:10.24432/C50P49, CC BY 4.0), which scikit-learn ships in its
wheel. Nothing is downloaded. Strokes are light: a pixel is 1 if its 4 x 4 cells are all ink, and -1
if none is.

A fifth of each digit, 359 images together, is held out. The split is fixed, so that accuracies can
be compared. The images do not say who wrote them: the same writers are in both parts.
"""

from __future__ import annotations

from typing import ClassVar, Final

import attrs
import numpy as np

from arb_ternary_vision.data.source import (
    LABELS,
    SPLIT_SEED,
    TUNING_FRACTION,
    TUNING_SEED,
    LabelledSource,
    split_by_class,
    tuning_option,
)

#: Largest grey level.
_LEVELS: Final = 16
#: Share of each digit that is held out.
_FRACTION: Final = 0.2


@attrs.frozen
class DigitsConfig:
    """Options of the data source ``digits``."""

    sized_samples: ClassVar[bool] = True

    tuning: bool = tuning_option("image")


def build(config: DigitsConfig) -> LabelledSource:
    """Build the data source of ``config``."""
    # Imported here, because reading a config should not take the seconds that both take.
    from sklearn.datasets import load_digits

    from arb_ternary_vision.data.batches import MemorySamples

    found = load_digits()
    images = found.images.astype(np.uint8)[:, None]
    labels = found.target.astype(np.int64)
    whole = MemorySamples("digits", images, {LABELS: labels}, levels=_LEVELS)
    kept, held_out = split_by_class(labels, _FRACTION, SPLIT_SEED)
    train = whole.take(kept, "digits, training images")
    validation = whole.take(held_out, "digits, held-out images")
    if config.tuning:
        kept, held_out = split_by_class(train.extras[LABELS], TUNING_FRACTION, TUNING_SEED)
        validation = train.take(held_out, "digits, tuning images")
        train = train.take(kept, "digits, training images")
    return LabelledSource(
        name="digits", classes=tuple("0123456789"), train=train, validation=validation
    )
