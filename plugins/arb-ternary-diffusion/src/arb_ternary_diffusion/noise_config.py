"""Options of the masking strategy ``noise``. This module does not import torch."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from arb_ternary.config.options import fraction, option

ScheduleName = Literal["cosine", "linear"]
PredictionName = Literal["x0", "epsilon", "v"]


@frozen(kw_only=True)
class NoiseConfig:
    """Options of the masking strategy ``noise``."""

    prediction: PredictionName = option(
        "v",
        "what the model predicts: x0 (the image), epsilon (the noise), or v, a mixture of both",
    )
    schedule: ScheduleName = option(
        "cosine",
        "how the noise grows with the time: cosine or linear",
    )
    label_dropout: float = option(
        0.1,
        "share of training images without their class, so that the model also learns images of any "
        "class; 0 = none, and no guidance",
        validator=fraction,
    )
