"""Options of the captioner."""

from __future__ import annotations

import attrs
from attrs import frozen

from arb_ternary.config.options import LARGEST_COUNT, non_negative, option
from arb_ternary_text.models.config import MAX_LAYERS, DecoderConfig
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
        largest=MAX_LAYERS,
    )
    layers: int = decoder_option(
        "layers",
        "blocks in which a character sees the patches and the characters before it",
        default=2,
    )
    max_length: int = decoder_option("max_length", "longest text, in characters", default=64)

    def check(self) -> None:
        """Check options that the decoder does not have against each other.

        Raises:
            ValueError: they contradict each other.
        """
        super().check()
        longest = LARGEST_COUNT - self.patches
        if self.max_length > longest:
            raise ValueError(
                f"'max_length' must be at most {longest}, because {self.patches} patches come "
                f"before the text; it is {self.max_length}"
            )

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
