"""Options of the convolutional network."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from arb_ternary.config.options import Rule, option
from arb_ternary_vision.models.config import ImageModelConfig, as_in_decoder

# : Channels double from stage to stage; beyond so many stages an image of the longest side is one
# pixel.
MAX_STAGES = 12


@frozen(kw_only=True)
class ConvnetConfig(ImageModelConfig):
    """A residual network of ternary convolutions; the classes come from the data.

    The default is pure: every weight is ternary, no parameter and no buffer is float.
    """

    width: int = as_in_decoder(
        "width", "channels of the first stage; each later one has twice those before", default=32
    )
    stages: int = option(
        2,
        "each but the first begins with a convolution of stride 2, which halves height and width",
        validator=Rule(
            f"from 1 to {MAX_STAGES}",
            lambda value: 1 <= value <= MAX_STAGES,
            {"minimum": 1, "maximum": MAX_STAGES},
        ),
    )
    layers: int = as_in_decoder("layers", "residual blocks of each stage", default=2)
    kernel_size: int = option(
        3,
        "pixels of a side of each convolution's kernel, odd",
        validator=Rule(
            "an odd number of at least 1",
            lambda value: value >= 1 and value % 2 == 1,
            {"minimum": 1},
        ),
    )

    def check(self) -> None:
        """What options that the decoder has not ask of each other; ValueError where they
        contradict.
        """
        smallest = min(self.sides)
        if 2 ** (self.stages - 1) > smallest:
            raise ValueError(
                f"'stages' must be at most {smallest.bit_length()} for 'image_size' "
                f"{self.image_size}, which each but the first halves; it is {self.stages}"
            )

    def in_decoder(self) -> dict[str, Any]:
        """Options of the decoder that follow from those here; there is no attention."""
        return {"heads": 1, "head_dim": 2}
