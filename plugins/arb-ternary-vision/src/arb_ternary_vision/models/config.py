"""Options that models of images share, with the names and meanings that they have in the
decoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import attrs
from attrs import frozen

from arb_ternary.config.fields import without_effect
from arb_ternary.config.options import ACTIVE_WHEN, HELP, Rule, option
from arb_ternary.optim.protocol import Planned
from arb_ternary.specs import TrainedPart
from arb_ternary_text.models.config import DecoderConfig, FloatPart
from arb_ternary_vision.sizes import Pair, pair, size


def as_in_decoder(name: str, help: str = "", default: Any = None) -> Any:  # noqa: A002
    """The option ``name`` as :class:`~arb_ternary_text.models.config.DecoderConfig` has it.

    Args:
        name: of the option there.
        help: what it means here, where that is not the same.
        default: here, where it is another than there.
    """
    found = attrs.fields_dict(DecoderConfig)[name]
    return attrs.field(
        default=found.default if default is None else default,
        validator=found.validator,
        converter=found.converter,
        # Conditions for an effect are about the decoder's other options.
        metadata={HELP: help or found.metadata[HELP], ACTIVE_WHEN: ()},
    )


@frozen(kw_only=True)
class ImageModelConfig:
    """What every model that reads images is told."""

    image_size: int | tuple[int, int] = option(
        8,
        "pixels of a side of the images, or [height, width] of images that are no squares",
        validator=size,
    )
    channels: int = option(
        1,
        "numbers of a pixel: 1 = grey, 3 = colours",
        validator=Rule("at least 1", lambda value: value >= 1, {"minimum": 1}),
    )
    group_size: Literal[32, 64, 128, 256, "row", "tensor"] = as_in_decoder("group_size")
    activations: Literal["int8", "float"] = as_in_decoder(
        "activations",
        "precision of what enters each linear: int8 with one scale a patch or pixel, or float",
    )
    gradients: Literal["float", "int8"] = as_in_decoder("gradients")
    float_parts: tuple[FloatPart, ...] = as_in_decoder(
        "float_parts",
        "parts kept in float32: embedding (of patches, or the first convolution), head, norms "
        "(learned float gains), linears (convolutions too); empty = pure ternary",
    )
    learned_norms: bool = as_in_decoder("learned_norms")
    sub_norms: bool | None = as_in_decoder(
        "sub_norms",
        "normalise also what enters the last linear or convolution of a branch; null = true",
    )
    norm_eps: float = as_in_decoder("norm_eps")
    scale_rule: Literal["residual", "frozen"] = as_in_decoder("scale_rule")
    vote_bits: Literal[8, 4, 2] = as_in_decoder("vote_bits")
    residual_scale: int = as_in_decoder("residual_scale")
    logit_scale: int = as_in_decoder("logit_scale")
    zero_residual: bool = as_in_decoder("zero_residual")

    def __attrs_post_init__(self) -> None:
        self.check()
        # It checks what the options ask of each other wherever the decoder has them too.
        _ = self.parts

    def check(self) -> None:
        """What options that the decoder has not ask of each other; ValueError where they
        contradict.
        """

    @property
    def parts(self) -> DecoderConfig:
        """The options as parts of the decoder take them. All positions see each other."""
        mine = {field.name for field in attrs.fields(type(self))}
        shared = {field.name for field in attrs.fields(DecoderConfig)} & mine
        return DecoderConfig(
            **{
                **{name: getattr(self, name) for name in shared},
                "causal": False,
                **self.in_decoder(),
            }
        )

    def in_decoder(self) -> dict[str, Any]:
        """Options of the decoder that follow from those here."""
        return {}

    @property
    def sides(self) -> Pair:
        """Height and width of the images."""
        return pair(self.image_size)

    @property
    def looks_up(self) -> bool:
        """Whether an embedding looks up vectors, for places or characters."""
        return False

    def planned(self) -> Planned:
        """What an optimizer will find in the model."""
        floats = set(self.float_parts)
        matrices = {"embedding", "head", "linears"} - floats
        tables = self.looks_up and "embedding" not in floats
        gains = self.learned_norms and "norms" not in floats
        there: dict[TrainedPart, bool] = {"ternary": bool(matrices) or gains, "float": bool(floats)}
        return Planned(
            kinds=frozenset(kind for kind in there if there[kind]),
            matrices=bool(floats - {"norms"}),
            vote_bits=self.vote_bits,
            integers=self.gradients == "int8"
            and (tables or gains or (self.activations == "int8" and bool(matrices))),
            exponents=self.scale_rule == "residual" and (bool(matrices) or gains),
        )

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        if "norms" in self.float_parts:
            yield from without_effect(
                self, "norms among the 'float_parts' have gains anyway", "learned_norms"
            )
        # A phase that changes the model may put ternary linears where there were none.
        changed = any(hasattr(phase.options, "planned_in") for phase in run.phases)
        added = changed and planned is not None and "ternary" in planned.kinds | planned.idle
        if {"embedding", "head", "linears"} <= set(self.float_parts) and not added:
            yield from without_effect(self, "no linear learns by votes", "group_size")
