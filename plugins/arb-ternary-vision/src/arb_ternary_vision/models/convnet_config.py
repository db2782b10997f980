"""Options of the convolutional network."""

from __future__ import annotations

from typing import Any, Final

from attrs import frozen

from arb_ternary.config.options import Rule, option, whole
from arb_ternary_vision.models.config import ImageModelConfig, decoder_option
from arb_ternary_vision.sizes import MAX_SIDE

#: Most resolutions of a model. After so many halvings an image of the longest side is one pixel.
MAX_STAGES: Final = 12

#: Validator of a number of resolutions, each half as high and wide as the one before.
resolutions: Final = whole(1, MAX_STAGES)


@frozen(kw_only=True)
class ConvnetConfig(ImageModelConfig):
    """A residual network of ternary convolutions; the classes come from the data.

    The default is pure: every weight is ternary, no parameter and no buffer is float.
    """

    width: int = decoder_option(
        "width",
        "channels of the first stage; each later one has twice those of the one before",
        default=32,
    )
    stages: int = option(
        2,
        "resolutions; each stage but the first begins with a convolution of stride 2, which halves "
        "height and width",
        validator=resolutions,
    )
    layers: int = decoder_option("layers", "residual blocks of each stage", default=2)
    kernel_size: int = option(
        3,
        "side of the kernel of each convolution in pixels, odd",
        validator=Rule(
            "an odd number of at least 1",
            lambda value: value >= 1 and value % 2 == 1,
            {"minimum": 1},
        ),
        largest=MAX_SIDE,
    )

    def check(self) -> None:
        """Check options that the decoder does not have against each other.

        Raises:
            ValueError: they contradict each other.
        """
        smallest = min(self.sides)
        if 2 ** (self.stages - 1) > smallest:
            raise ValueError(
                f"'stages' must be at most {smallest.bit_length()} for 'image_size' "
                f"{self.image_size}, which each but the first halves; it is {self.stages}"
            )

    def implied_options(self) -> dict[str, Any]:
        """Return options of the decoder that follow from the options here.

        There is no attention.
        """
        return {"heads": 1, "head_dim": 2}
