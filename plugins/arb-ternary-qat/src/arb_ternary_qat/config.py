"""Options of the models and optimizers of this plugin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import attrs
from attrs import frozen
from attrs.validators import and_, ge, gt, in_, instance_of, le, lt

from arb_ternary.config.choice import ModelChoice
from arb_ternary.config.fields import without_effect
from arb_ternary.config.options import non_negative, option, optional
from arb_ternary.optim.protocol import Planned
from arb_ternary.specs import TrainedPart
from arb_ternary_text.models.config import FLOAT_PARTS, DecoderConfig, FloatPart

# : What the codes of a directly trained weight may be: {-1, 0, 1}, or whole numbers from -127 to
# 127.
Levels = Literal["ternary", "int8"]

_decay = and_(ge(0.0), lt(1.0))


@frozen(kw_only=True)
class BitnetConfig(DecoderConfig):
    """The decoder's options. ``float_parts`` says what has float master weights, and the linears
    always do.
    """

    float_parts: tuple[FloatPart, ...] = option(
        FLOAT_PARTS,
        "parts with float32 weights: embedding, head, norms and always linears, which are ternary "
        "in the forward pass",
        validator=attrs.fields(DecoderConfig).float_parts.validator,
        converter=tuple,
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _need_linears(
            "bitnet", "makes the float weights of linears ternary in each pass", self.float_parts
        )


@frozen(kw_only=True)
class BitnetOfConfig:
    """The model that is trained in the manner of BitNet b1.58.

    Who asks these options for one of the model's own, as ``max_length``, or for what it plans to
    train, hears the inner model's answer.
    """

    model: ModelChoice = option(
        help="the model: each of its float linears, but those of a head, is made ternary in the "
        "forward pass"
    )

    def __attrs_post_init__(self) -> None:
        parts = getattr(self.model.options, "float_parts", None)
        if parts is not None and "linears" not in parts:
            raise ValueError(
                f"the 'float_parts' of 'model' must name linears: bitnet_of makes the float "
                f"weights of linears ternary "
                f"in each pass; for linears that learn by votes use model {self.model.name} alone"
            )

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        for phase in run.phases:
            if hasattr(phase.options, "planned_in"):
                text = (
                    f"phase {phase.name!r} puts parts into the model that would not be those of "
                    "bitnet_of"
                )
                yield (
                    "",
                    f"{text}; use phases that keep the model as it is, or model {self.model.name} "
                    f"alone",
                )

    def __getattr__(self, name: str) -> Any:
        # What a config is asked about itself is asked of nested components too.
        if name.startswith("_") or name in ("model", "planned_for"):
            raise AttributeError(name)
        return getattr(self.model.options, name)


@frozen(kw_only=True)
class DirectConfig(DecoderConfig):
    """The decoder's options. ``float_parts`` names what is not ternary by votes; the linears are
    integers instead.
    """

    float_parts: tuple[FloatPart, ...] = option(
        FLOAT_PARTS,
        "parts with float32 weights: embedding, head, norms; linears must be named and are stored "
        "as integers instead",
        validator=attrs.fields(DecoderConfig).float_parts.validator,
        converter=tuple,
    )
    levels: Levels = option(
        "ternary",
        "what a weight of a linear may be: ternary = {-1, 0, 1}, int8 = -127 to 127, times one "
        "fixed scale a matrix",
        validator=in_(("ternary", "int8")),
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _need_linears("direct", "stores linears as integers", self.float_parts)

    def planned(self) -> Planned:
        """What an optimizer will find in the model."""
        others = set(self.float_parts) - {"linears"}
        found = super().planned()
        kinds: set[TrainedPart] = {"stored", *found.kinds}
        if not (others or self.float_vectors):
            kinds.discard("float")
        return attrs.evolve(found, kinds=frozenset(kinds), matrices=bool(others - {"norms"}))


def _need_linears(model: str, why: str, float_parts: tuple[FloatPart, ...]) -> None:
    if "linears" not in float_parts:
        raise ValueError(
            f"'float_parts' must name linears: model {model} {why}; for linears that learn by "
            f"votes use model decoder"
        )


@frozen(kw_only=True)
class BitnetAdamWConfig:
    """Options of AdamW with the weight decay of the BitNet recipe."""

    lr: float = option(
        1e-3, "learning rate at the start; a schedule multiplies it", validator=gt(0.0)
    )
    beta1: float = option(0.9, "decay of the first moment", validator=_decay)
    beta2: float = option(0.95, "decay of the second moment", validator=_decay)
    eps: float = option(1e-8, "added to the root of the second moment", validator=gt(0.0))
    weight_decay: float = option(
        0.1,
        "decoupled decay of matrices until decay_steps; vectors do not decay",
        validator=ge(0.0),
    )
    decay_steps: int | None = option(
        None,
        "steps with weight decay, half of all in the recipe; later ones have none; null = all have "
        "it",
        validator=optional(non_negative),
    )

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        if planned is not None and not planned.matrices:
            yield from without_effect(
                self, "no float parameter is a matrix", "weight_decay", "decay_steps"
            )
        elif self.decay_steps == 0:
            yield from without_effect(self, "'decay_steps' is 0", "weight_decay")
        elif self.weight_decay == 0:
            yield from without_effect(self, "'weight_decay' is 0", "decay_steps")


@frozen(kw_only=True)
class DQTConfig:
    """Options of direct quantised training."""

    lr: float = option(
        1e-3, "AdamW's learning rate at the start; a schedule multiplies it", validator=gt(0.0)
    )
    beta1: float = option(0.9, "decay of the first moment", validator=_decay)
    beta2: float = option(0.95, "decay of the second moment", validator=_decay)
    eps: float = option(1e-8, "added to the root of the second moment", validator=gt(0.0))
    weight_decay: float = option(0.0, "decoupled decay of the weights", validator=ge(0.0))


@frozen(kw_only=True)
class BopConfig:
    """Options of Bop."""

    gamma: float = option(
        1e-3,
        "share of the new gradient in the momentum; a schedule multiplies it",
        validator=and_(gt(0.0), le(1.0)),
    )
    tau: float = option(
        1e-8,
        "momentum at which a trit moves: a gradient, or with normalise a multiple of its root mean "
        "square",
        validator=gt(0.0),
    )
    normalise: bool = option(
        False,
        "divide the momentum by the root of each weight's mean squared gradient",
        validator=instance_of(bool),
    )
    sigma: float = option(
        1e-3,
        "share of the new squared gradient in its mean, where normalise is on",
        validator=and_(gt(0.0), le(1.0)),
    )
    eps: float = option(1e-10, "added to that root", validator=gt(0.0))

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        levels = getattr(run.model.options, "levels", "ternary")
        if levels != "ternary":
            yield (
                "",
                f"bop flips ternary weights, and the model's levels are {levels}; use ternary "
                f"levels, or dqt",
            )
        if not self.normalise:
            yield from without_effect(self, "'normalise' is false", "sigma", "eps")
