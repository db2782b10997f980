"""Options that models of images share.

An option that the decoder of ``arb_ternary_text`` has as well is declared there and taken over by
:func:`decoder_option`.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs
from attrs import frozen

from arb_ternary.config.fields import unused_options
from arb_ternary.config.options import ACTIVE_WHEN, HELP, Condition, option, positive
from arb_ternary.optim.protocol import Planned
from arb_ternary.specs import TrainedPart
from arb_ternary_text.models.config import DecoderConfig, FloatPart
from arb_ternary_vision.sizes import MAX_CHANNELS, Pair, pair, size

#: The parts of a model of images whose weights are matrices.
_MATRICES = frozenset(("embedding", "head", "linears"))


def decoder_option(
    name: str,
    help: str = "",  # noqa: A002
    default: Any = None,
    active_when: tuple[Condition, ...] = (),
) -> Any:
    """Return the option ``name`` as :class:`~arb_ternary_text.models.config.DecoderConfig` has it.

    The decoder's conditions for it to take effect are checked by the decoder's config
    (:attr:`ImageModelConfig.parts`).

    Args:
        name: its name in ``DecoderConfig``.
        help: another help text.
        default: another default.
        active_when: conditions besides those of the decoder.
    """
    found = attrs.fields_dict(DecoderConfig)[name]
    return attrs.field(
        default=found.default if default is None else default,
        validator=found.validator,
        converter=found.converter,
        metadata={HELP: help or found.metadata[HELP], ACTIVE_WHEN: active_when},
    )


def _has_voting_matrices(options: ImageModelConfig, run: Any, plan: Planned | None) -> bool:
    if run is None or not set(options.float_parts) >= _MATRICES:
        return True
    # A phase that changes the model may put ternary linears where there were none.
    changes_model = any(hasattr(phase.options, "planned_in") for phase in run.phases)
    return changes_model and plan is not None and "ternary" in plan.kinds | plan.idle


_voting_matrices = Condition(_has_voting_matrices, "no linear learns by votes")
_learned_gains = Condition(
    lambda options, run, plan: run is None or "norms" not in options.float_parts,
    "norms among the 'float_parts' have gains anyway",
)


@frozen(kw_only=True)
class ImageModelConfig:
    """Options of every model that reads images."""

    image_size: int | tuple[int, int] = option(
        8,
        "side of the images in pixels, or [height, width] of images that are not square",
        validator=size,
    )
    channels: int = option(
        1,
        "numbers per pixel: 1 = grey, 3 = colour",
        validator=positive,
        largest=MAX_CHANNELS,
    )
    group_size: Literal[32, 64, 128, 256, "row", "tensor"] = decoder_option(
        "group_size", active_when=(_voting_matrices,)
    )
    activations: Literal["int8", "float"] = decoder_option(
        "activations",
        "precision of the input of each linear: int8 with one scale per patch or pixel, or float",
    )
    gradients: Literal["float", "int8"] = decoder_option("gradients")
    float_parts: tuple[FloatPart, ...] = decoder_option(
        "float_parts",
        "parts kept in float32: embedding (of patches, or the first convolution), head, norms "
        "(learned float gains), linears (convolutions too); empty = pure ternary",
    )
    learned_norms: bool = decoder_option("learned_norms", active_when=(_learned_gains,))
    sub_norms: bool | None = decoder_option(
        "sub_norms",
        "normalise the input of the last linear or convolution of a branch too; null = true",
    )
    norm_eps: float = decoder_option("norm_eps")
    scale_rule: Literal["residual", "frozen"] = decoder_option("scale_rule")
    vote_bits: Literal[8, 4, 2] = decoder_option("vote_bits")
    residual_scale: int = decoder_option("residual_scale")
    logit_scale: int = decoder_option("logit_scale")
    zero_residual: bool = decoder_option("zero_residual")

    def __attrs_post_init__(self) -> None:
        for name, message in unused_options(self):
            raise ValueError(f"'{name}' {message}")
        self.check()
        # The decoder's config checks the options that it has as well.
        _ = self.parts

    def check(self) -> None:
        """Check options that the decoder does not have against each other.

        Raises:
            ValueError: they contradict each other.
        """

    @property
    def parts(self) -> DecoderConfig:
        """The options as the decoder's parts take them. All positions see each other."""
        own = {field.name for field in attrs.fields(type(self))}
        shared = own & {field.name for field in attrs.fields(DecoderConfig)}
        options = {name: getattr(self, name) for name in shared}
        options["causal"] = False
        if "embedding" not in self.float_parts:
            # The exponents of looked-up vectors learn like all others; a float table has none.
            options["embedding_scale_rule"] = self.scale_rule
        return DecoderConfig(**(options | self.implied_options()))

    def implied_options(self) -> dict[str, Any]:
        """Return options of the decoder that follow from the options here."""
        return {}

    @property
    def sides(self) -> Pair:
        """Height and width of the images."""
        return pair(self.image_size)

    @property
    def has_lookups(self) -> bool:
        """Whether the model looks up vectors: of positions, characters or classes."""
        return False

    def planned(self) -> Planned:
        """Return what an optimizer will find in the model."""
        floats = set(self.float_parts)
        has_matrices = not floats >= _MATRICES
        has_gains = self.learned_norms and "norms" not in floats
        has_tables = self.has_lookups and "embedding" not in floats

        kinds: set[TrainedPart] = set()
        if has_matrices or has_gains:
            kinds.add("ternary")
        if floats:
            kinds.add("float")

        # The gradient of a matrix can be an integer only if its input is.
        integers = has_tables or has_gains or (has_matrices and self.activations == "int8")
        return Planned(
            kinds=frozenset(kinds),
            matrices=bool(floats - {"norms"}),
            vote_bits=self.vote_bits,
            integers=self.gradients == "int8" and integers,
            exponents=self.scale_rule == "residual" and (has_matrices or has_gains),
        )
