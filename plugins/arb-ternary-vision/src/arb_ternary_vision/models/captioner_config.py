"""Options of the captioner."""

from __future__ import annotations

import attrs
from attrs import frozen

from arb_ternary.config.options import non_negative, option
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_vision.models.config import decoder_option
from arb_ternary_vision.models.vit_config import PatchModelConfig


@frozen(kw_only=True)
class CaptionerConfig(PatchModelConfig):
    """A decoder that writes a text about an image.

    It has blocks over the patches, then blocks over patches and text. The characters come from the
    data. The default is pure: every weight is ternary, no parameter and no buffer is float.
    """

    image_layers: int = option(
        2,
        "blocks in which patches see each other, in front of those of the text; 0 = none",
        validator=non_negative,
    )
    layers: int = decoder_option(
        "layers",
        "blocks in which a character sees the patches and the characters before it",
        default=2,
    )
    max_length: int = decoder_option("max_length", "longest text, in characters", default=64)

    @property
    def has_text(self) -> bool:
        """Whether the model also reads and writes text, whose positions are always rotary."""
        return True

    @property
    def text(self) -> DecoderConfig:
        """The options of the text's blocks.

        Their positions are the patches, row by row, and the characters.
        """
        return attrs.evolve(self.parts, causal=True, max_length=self.patches + self.max_length)
