"""The built-in images: scikit-learn's digits, 1,797 real handwritten digits of 8 x 8 pixels in 17
grey levels.

The test set of *Optical Recognition of Handwritten Digits* (E. Alpaydin, C. Kaynak, UCI Machine
Learning Repository, 1998, doi:10.24432/C50P49, CC BY 4.0), which scikit-learn ships in its wheel;
nothing is downloaded. Strokes are light: 1 where the 4 x 4 cells of a pixel are all ink, -1 where
none is.

Of each digit a fifth (359 images together) is held out. Which ones was drawn once and is part of
this package, so that accuracies can be compared. The images do not say who wrote them: the same
hands are in both parts.
"""

from __future__ import annotations

from typing import ClassVar, Final

import attrs
import numpy as np

from arb_ternary.config.options import option
from arb_ternary_vision.data.source import LABELS, LabelledSource, split_by_class

#: Largest grey level.
_LEVELS: Final = 16
#: Of the training images for ``tuning``, and of all images for the held-out part.
_FRACTION: Final = 0.2
#: The split into training and held-out images, and that of the training images for ``tuning``.
_SPLIT = 0
_TUNING_SPLIT = 1


@attrs.frozen
class DigitsConfig:
    """Options of the data source ``digits``."""

    sized_samples: ClassVar[bool] = True

    tuning: bool = option(
        False,
        "validate on a fifth of the training images and train on the rest, to choose settings by; "
        "the held-out images then stay unseen",
        validator=attrs.validators.instance_of(bool),
    )


def build(config: DigitsConfig) -> LabelledSource:
    """The data source of ``config``."""
    # Imported here, because both take seconds that reading a config should not.
    from sklearn.datasets import load_digits

    from arb_ternary_vision.data.batches import MemorySamples

    found = load_digits()
    whole = MemorySamples(
        "digits",
        found.images.astype(np.uint8)[:, None],
        {LABELS: found.target.astype(np.int64)},
        levels=_LEVELS,
    )
    kept, held_out = split_by_class(whole.extras[LABELS], _FRACTION, _SPLIT)
    training = whole.at(kept, "digits, training images")
    validation = whole.at(held_out, "digits, held-out images")
    if config.tuning:
        kept, held_out = split_by_class(training.extras[LABELS], _FRACTION, _TUNING_SPLIT)
        whole = training
        training = whole.at(kept, "digits, training images")
        validation = whole.at(held_out, "digits, tuning images")
    return LabelledSource("digits", tuple("0123456789"), training, validation)
