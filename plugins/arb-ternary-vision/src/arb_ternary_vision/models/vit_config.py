"""Options of the vision transformer and of other models of patches."""

from __future__ import annotations

from typing import Any, Literal

from attrs import frozen

from arb_ternary.config.options import Condition, option
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_vision.models.config import ImageModelConfig, decoder_option
from arb_ternary_vision.sizes import Pair, pair, size

_rotates = Condition(
    lambda options, run, plan: options.has_rotary or options.has_text, "'positions' is learned"
)


@frozen(kw_only=True)
class PatchModelConfig(ImageModelConfig):
    """Options of models whose blocks read the patches of an image."""

    patch_size: int | tuple[int, int] = option(
        2,
        "side of a patch in pixels, or [height, width]; must divide the image's",
        validator=size,
    )
    width: int = decoder_option("width", default=128)
    layers: int = decoder_option("layers")
    heads: int = decoder_option("heads", "attention heads")
    head_dim: int | None = decoder_option(
        "head_dim",
        "features of a head, a multiple of 4 for rotary positions; null = width / heads",
    )
    feed_forward: int | None = decoder_option("feed_forward")
    activation: Literal["relu2", "swiglu", "reglu2"] | None = decoder_option("activation")
    query_key_norm: bool | None = decoder_option("query_key_norm")
    positions: Literal["rotary", "learned", "both"] = option(
        "both",
        "how patches are told apart: rotary = queries and keys are rotated by row and column, "
        "learned = each position has a learned vector",
    )
    rotary_base: float = decoder_option(
        "rotary_base",
        "longest wavelength of rotary positions over 2 pi, in patches",
        default=100.0,
        active_when=(_rotates,),
    )
    experts: int = decoder_option("experts")
    experts_per_token: int = decoder_option(
        "experts_per_token", "experts that a patch is routed to in one pass"
    )
    max_moe_iters: int = decoder_option(
        "max_moe_iters",
        "most passes through the experts: a patch is routed again from its refined state until its "
        "choice repeats",
    )

    def check(self) -> None:
        """Check options that the decoder does not have against each other.

        Raises:
            ValueError: they contradict each other.
        """
        for side, part, name in zip(self.sides, self.patch_sides, ("height", "width"), strict=True):
            if side % part:
                raise ValueError(
                    f"'patch_size' must divide 'image_size'; a {name} of {part} does not divide "
                    f"{side} pixels"
                )
        if self.has_rotary:
            self._check_planes()

    def _check_planes(self) -> None:
        """Check that rows and columns can share the planes of a head evenly."""
        if self.head_dim is not None:
            if self.head_dim % 4:
                raise ValueError(
                    "'head_dim' must be a multiple of 4 for rotary positions, whose planes rows "
                    f"and columns share; it is {self.head_dim}"
                )
            return
        features, remainder = divmod(self.width, self.heads)
        if remainder == 0 and features % 4:
            raise ValueError(
                "'width' must be a multiple of 4 'heads' for rotary positions, whose planes rows "
                f"and columns share; {self.width} / {self.heads} is {features}"
            )

    def implied_options(self) -> dict[str, Any]:
        """Return options of the decoder that follow from the options here."""
        return {"max_length": self.patches}

    @property
    def decoder(self) -> DecoderConfig:
        """The options of the blocks, for code that makes more of them."""
        return self.parts

    @property
    def has_rotary(self) -> bool:
        """Whether queries and keys are rotated by row and column."""
        return self.positions != "learned"

    @property
    def has_learned_positions(self) -> bool:
        """Whether each position has a learned vector."""
        return self.positions != "rotary"

    @property
    def has_text(self) -> bool:
        """Whether the model also reads and writes text, whose positions are always rotary."""
        return False

    @property
    def has_lookups(self) -> bool:
        """Whether the model looks up vectors: of positions, characters or classes."""
        return self.has_learned_positions or self.has_text

    @property
    def patch_sides(self) -> Pair:
        """Height and width of a patch."""
        return pair(self.patch_size)

    @property
    def grid(self) -> Pair:
        """Rows and columns of patches."""
        return self.sides[0] // self.patch_sides[0], self.sides[1] // self.patch_sides[1]

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        rows, columns = self.grid
        return rows * columns


@frozen(kw_only=True)
class VitConfig(PatchModelConfig):
    """A vision transformer: patches, blocks without a causal mask, the mean of all patches, a head.

    The classes come from the data. The default is pure: every weight is ternary, no parameter and
    no buffer is float.
    """
