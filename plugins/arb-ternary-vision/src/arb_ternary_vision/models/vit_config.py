"""Options of the vision transformer."""

from __future__ import annotations

from typing import Any, Literal

import attrs
from attrs import frozen
from attrs.validators import in_

from arb_ternary.config.options import option
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_vision.models.config import ImageModelConfig, as_in_decoder
from arb_ternary_vision.sizes import Pair, pair, size


@frozen(kw_only=True)
class PatchModelConfig(ImageModelConfig):
    """Options of models whose blocks read the patches of an image."""

    patch_size: int | tuple[int, int] = option(
        2,
        "pixels of a side of a patch, or [height, width]; must divide the image's",
        validator=size,
    )
    width: int = as_in_decoder("width", default=128)
    layers: int = as_in_decoder("layers")
    heads: int = as_in_decoder("heads", "attention heads")
    head_dim: int | None = as_in_decoder(
        "head_dim",
        "features of a head, a multiple of 4 where positions are rotary; null = width / heads",
    )
    feed_forward: int | None = as_in_decoder("feed_forward")
    activation: Literal["relu2", "swiglu", "reglu2"] | None = as_in_decoder("activation")
    query_key_norm: bool | None = as_in_decoder("query_key_norm")
    positions: Literal["rotary", "learned", "both"] = option(
        "both",
        "what tells patches apart: rotary = queries and keys turn by how far apart rows and "
        "columns are, learned = each place has a vector of its own",
        validator=in_(("rotary", "learned", "both")),
    )
    rotary_base: float = as_in_decoder(
        "rotary_base", "longest wavelength of rotary positions over 2 pi, in patches", default=100.0
    )
    experts: int = as_in_decoder("experts")
    experts_per_token: int = as_in_decoder(
        "experts_per_token", "experts that a patch is routed to in one pass"
    )
    max_moe_iters: int = as_in_decoder(
        "max_moe_iters",
        "most passes through the experts: a patch is routed again, from its refined state, until "
        "its choice repeats",
    )

    def check(self) -> None:
        """What options that the decoder has not ask of each other; ValueError where they
        contradict.
        """
        for side, part, name in zip(self.sides, self.patch_sides, ("height", "width"), strict=True):
            if side % part:
                raise ValueError(
                    f"'patch_size' must divide 'image_size'; a {name} of {part} does not divide "
                    f"{side} pixels"
                )
        if not self.turns:
            if not self.writes and self.rotary_base != attrs.fields(type(self)).rotary_base.default:
                raise ValueError("'rotary_base' has no effect where 'positions' are learned")
        elif (
            self.head_dim is None and self.width % self.heads == 0 and self.width // self.heads % 4
        ):
            raise ValueError(
                "'width' must be a multiple of 4 'heads' for rotary positions, whose planes rows "
                f"and columns share; {self.width} / {self.heads} is {self.width // self.heads}"
            )
        elif self.head_dim is not None and self.head_dim % 4:
            raise ValueError(
                "'head_dim' must be a multiple of 4 for rotary positions, whose planes rows and "
                f"columns share; it is {self.head_dim}"
            )

    def in_decoder(self) -> dict[str, Any]:
        """Options of the decoder that follow from those here."""
        return {"max_length": self.grid[0] * self.grid[1]}

    @property
    def decoder(self) -> DecoderConfig:
        """Options of the blocks, which are a decoder's: what makes more of them asks for it."""
        return self.parts

    @property
    def turns(self) -> bool:
        """Whether queries and keys turn by row and column."""
        return self.positions != "learned"

    @property
    def looks_up(self) -> bool:
        """Whether an embedding looks up vectors, for places or characters."""
        return self.has_places or self.writes

    @property
    def writes(self) -> bool:
        """Whether the model also reads and writes text, whose positions always turn."""
        return False

    @property
    def has_places(self) -> bool:
        """Whether each place has a vector of its own."""
        return self.positions != "rotary"

    @property
    def patch_sides(self) -> Pair:
        """Height and width of a patch."""
        return pair(self.patch_size)

    @property
    def grid(self) -> Pair:
        """Rows and columns of patches."""
        return self.sides[0] // self.patch_sides[0], self.sides[1] // self.patch_sides[1]


@frozen(kw_only=True)
class VitConfig(PatchModelConfig):
    """A vision transformer: patches, the decoder's blocks without a mask, the mean of all patches,
    a head.

    The classes come from the data. The default is pure: every weight is ternary, no parameter and
    no buffer is float.
    """
