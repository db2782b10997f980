"""Options of the captioner."""

from __future__ import annotations

from typing import Any

import attrs
from attrs import frozen

from arb_ternary.config.options import Rule, option
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_vision.models.config import as_in_decoder
from arb_ternary_vision.models.vit_config import PatchModelConfig


@frozen(kw_only=True)
class CaptionerConfig(PatchModelConfig):
    """A decoder that writes a text about an image: blocks over the patches, then blocks over
    patches and text.

    The characters come from the data. The default is pure: every weight is ternary, no parameter
    and no buffer is float.
    """

    image_layers: int = option(
        2,
        "blocks in which patches see each other, before the text does; 0 = none",
        validator=Rule("0 or greater", lambda value: value >= 0, {"minimum": 0}),
    )
    layers: int = as_in_decoder(
        "layers",
        "blocks in which a character sees the patches and the characters before it",
        default=2,
    )
    max_length: int = as_in_decoder("max_length", "longest text, in characters", default=64)

    @property
    def writes(self) -> bool:
        """Whether the model also reads and writes text, whose positions always turn."""
        return True

    @property
    def text(self) -> DecoderConfig:
        """Options of the blocks of the text, whose positions are the patches, row by row, and the
        characters.
        """
        return attrs.evolve(
            self.parts, causal=True, max_length=self.grid[0] * self.grid[1] + self.max_length
        )

    def in_decoder(self) -> dict[str, Any]:
        """Options of the decoder that follow from those here."""
        # The embedding of characters has the exponents of everything else; a float one has none.
        rule = "residual" if "embedding" in self.float_parts else self.scale_rule
        return {**super().in_decoder(), "embedding_scale_rule": rule}
