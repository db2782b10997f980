"""Options of models that remove noise from images. This module does not import torch."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from arb_ternary.config.options import option
from arb_ternary_text.models.config import FloatPart
from arb_ternary_vision.models.config import ImageModelConfig, decoder_option
from arb_ternary_vision.models.convnet_config import resolutions
from arb_ternary_vision.models.vit_config import PatchModelConfig

_LOGIT_SCALE = "predictions are 2^logit_scale times the head's output"
_FLOAT_PARTS = (
    "parts kept in float32: embedding (of pixels or patches, and of classes), head, norms (learned "
    "float gains), linears (convolutions too); empty = pure ternary"
)


def _check_width(width: int) -> None:
    if width % 2:
        raise ValueError(
            f"'width' must be even, because times are sines and cosines; it is {width}"
        )


@frozen(kw_only=True)
class DiTConfig(PatchModelConfig):
    """A diffusion transformer over patches (Peebles and Xie, 2023); the classes come from the data.

    The default is pure: every weight is ternary, no parameter and no buffer is float.
    """

    width: int = decoder_option("width", default=64)
    float_parts: tuple[FloatPart, ...] = decoder_option("float_parts", _FLOAT_PARTS)
    logit_scale: int = decoder_option("logit_scale", _LOGIT_SCALE)

    def check(self) -> None:
        """Check options that the decoder does not have against each other.

        Raises:
            ValueError: they contradict each other.
        """
        super().check()
        _check_width(self.width)

    @property
    def has_lookups(self) -> bool:
        """Whether the model looks up vectors: of classes, always."""
        return True


@frozen(kw_only=True)
class UNetConfig(ImageModelConfig):
    """A U-Net (Ronneberger et al., 2015) of convolutions, each block with the time.

    The time in every block is that of Ho et al. (2020). The classes come from the data. The default
    is pure: every weight is ternary, no parameter and no buffer is float.
    """

    width: int = decoder_option(
        "width",
        "channels of the first level; each later one has twice those of the one before",
        default=32,
    )
    float_parts: tuple[FloatPart, ...] = decoder_option("float_parts", _FLOAT_PARTS)
    logit_scale: int = decoder_option("logit_scale", _LOGIT_SCALE)
    levels: int = option(
        2,
        "resolutions; each level but the first begins with a convolution of stride 2, which halves "
        "height and width",
        validator=resolutions,
    )
    layers: int = decoder_option(
        "layers",
        "residual blocks of a level on the way down, and again on the way up",
        default=2,
    )

    def check(self) -> None:
        """Check options that the decoder does not have against each other.

        Raises:
            ValueError: they contradict each other.
        """
        _check_width(self.width)
        height, width = self.sides
        needed = 2 ** (self.levels - 1)
        if height % needed or width % needed:
            raise ValueError(
                f"'levels' must halve both sides of 'image_size', {height} and {width}, to whole "
                f"numbers; {self.levels} levels need multiples of {needed}"
            )

    def implied_options(self) -> dict[str, Any]:
        """Return options of the decoder that follow from the options here.

        There is no attention.
        """
        return {"heads": 1, "head_dim": 2}

    @property
    def has_lookups(self) -> bool:
        """Whether the model looks up vectors: of classes, always."""
        return True
