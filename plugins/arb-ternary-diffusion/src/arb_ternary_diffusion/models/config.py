"""Options of models that take noise away, read without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from arb_ternary.config.options import Rule, option
from arb_ternary.optim.protocol import Planned
from arb_ternary_text.models.config import FloatPart
from arb_ternary_vision.models.config import ImageModelConfig, as_in_decoder
from arb_ternary_vision.models.vit_config import PatchModelConfig

#: More levels than any picture can be halved to.
_MOST_LEVELS = 12
_LOGIT_SCALE = "what is predicted is 2^logit_scale times the head's output"
_FLOAT_PARTS = (
    "parts kept in float32: embedding (of pixels or patches, and of classes), head, norms (learned "
    "float gains), linears (convolutions too); empty = pure ternary"
)


class _KnowsTimeAndClass:
    """What follows, for the options of a model of images, from its knowing a time and a class."""

    __slots__ = ()

    if TYPE_CHECKING:  # at run time these would be taken for the types of the options
        width: int
        gradients: str
        float_parts: tuple[FloatPart, ...]
        scale_rule: str

    def check(self) -> None:
        """See :class:`~arb_ternary_vision.models.config.ImageModelConfig`."""
        super().check()  # type: ignore[misc]
        if self.width % 2:
            raise ValueError(
                f"'width' must be even, for times are sines and cosines; it is {self.width}"
            )

    def in_decoder(self) -> dict[str, Any]:
        """See :class:`~arb_ternary_vision.models.config.ImageModelConfig`."""
        classes = (
            {} if "embedding" in self.float_parts else {"embedding_scale_rule": self.scale_rule}
        )
        return {**super().in_decoder(), **classes}  # type: ignore[misc]

    def planned(self) -> Planned:
        """What an optimizer will find in the model, in which classes are looked up."""
        planned: Planned = super().planned()  # type: ignore[misc]
        looked_up = self.gradients == "int8" and "embedding" not in self.float_parts
        return evolve(planned, integers=planned.integers or looked_up)


@frozen(kw_only=True)
class DiTConfig(_KnowsTimeAndClass, PatchModelConfig):
    """A diffusion transformer over patches (Peebles and Xie, 2023); the classes come from the data.

    The default is pure: every weight is ternary, no parameter and no buffer is float.
    """

    width: int = as_in_decoder("width", default=64)
    float_parts: tuple[FloatPart, ...] = as_in_decoder("float_parts", _FLOAT_PARTS)
    logit_scale: int = as_in_decoder("logit_scale", _LOGIT_SCALE)


@frozen(kw_only=True)
class UNetConfig(_KnowsTimeAndClass, ImageModelConfig):
    """A U-Net (Ronneberger et al., 2015) with a time in every block (Ho et al., 2020), of
    convolutions alone.

    The classes come from the data. The default is pure: every weight is ternary, no parameter and
    no buffer is float.
    """

    width: int = as_in_decoder(
        "width", "channels of the first level; each later one has twice those before", default=32
    )
    float_parts: tuple[FloatPart, ...] = as_in_decoder("float_parts", _FLOAT_PARTS)
    logit_scale: int = as_in_decoder("logit_scale", _LOGIT_SCALE)
    levels: int = option(
        2,
        "resolutions; each but the first begins with a convolution of stride 2, which halves "
        "height and width",
        validator=Rule(
            f"from 1 to {_MOST_LEVELS}",
            lambda value: 1 <= value <= _MOST_LEVELS,
            {"minimum": 1, "maximum": _MOST_LEVELS},
        ),
    )
    layers: int = as_in_decoder(
        "layers", "residual blocks of a level on the way down, and as many on the way up", default=2
    )

    def check(self) -> None:
        """See :class:`~arb_ternary_vision.models.config.ImageModelConfig`."""
        super().check()
        needed = 2 ** (self.levels - 1)
        if any(side % needed for side in self.sides):
            raise ValueError(
                f"'levels' must halve both sides of 'image_size', {self.sides[0]} and "
                f"{self.sides[1]}, to whole "
                f"numbers; {self.levels} levels need multiples of {needed}"
            )

    def in_decoder(self) -> dict[str, Any]:
        """See :class:`~arb_ternary_vision.models.config.ImageModelConfig`; there is no
        attention.
        """
        return {**super().in_decoder(), "heads": 1, "head_dim": 2}
