"""Options of the models and optimizers of this plugin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

import attrs
from attrs import frozen
from attrs.validators import and_, ge, gt, in_, instance_of, le, lt

from arb_ternary.config.choice import ModelChoice
from arb_ternary.config.options import Condition, non_negative, option, optional, unless, when
from arb_ternary.optim.protocol import Planned
from arb_ternary.specs import TrainedPart
from arb_ternary_text.models.config import FLOAT_PARTS, DecoderConfig, FloatPart

#: Codes of a directly trained weight: {-1, 0, 1}, or integers from -127 to 127.
Levels = Literal["ternary", "int8"]

_decay = and_(ge(0.0), lt(1.0))
_HAS_MATRICES: Final = Condition(
    lambda options, run, plan: plan is None or plan.matrices, "no float parameter is a matrix"
)
_NORMALISES: Final = when("normalise")


@frozen(kw_only=True)
class BitnetConfig(DecoderConfig):
    """The decoder's options; ``float_parts`` always includes linears, which have float masters."""

    float_parts: tuple[FloatPart, ...] = option(
        FLOAT_PARTS,
        "parts with float32 weights: embedding, head, norms, and always linears, which are ternary "
        "in the forward pass",
        validator=attrs.fields(DecoderConfig).float_parts.validator,
        converter=tuple,
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _need_linears(
            "bitnet", "rounds float weights of linears in each forward pass", self.float_parts
        )


@frozen(kw_only=True)
class BitnetOfConfig:
    """The model that is trained as BitNet b1.58.

    Attributes that these options lack, such as ``max_length``, are those of the inner model.
    """

    model: ModelChoice = option(
        help="the model; its float linears, except those of a head, are ternary in the forward pass"
    )

    def __attrs_post_init__(self) -> None:
        parts = getattr(self.model.options, "float_parts", None)
        if parts is not None and "linears" not in parts:
            raise ValueError(
                "the 'float_parts' of 'model' must name linears because bitnet_of rounds float "
                "weights of linears in each forward pass; for linears that learn by votes use "
                f"model {self.model.name} alone"
            )

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        for phase in run.phases:
            if hasattr(phase.options, "planned_in"):
                yield (
                    "",
                    f"phase {phase.name!r} adds parts to the model that bitnet_of would not "
                    "convert; use phases that keep the model as it is, or model "
                    f"{self.model.name} alone",
                )

    def __getattr__(self, name: str) -> Any:
        # Nested components are checked by themselves.
        if name.startswith("_") or name in ("model", "planned_for"):
            raise AttributeError(name)
        return getattr(self.model.options, name)


@frozen(kw_only=True)
class DirectConfig(DecoderConfig):
    """The decoder's options; the linears are stored as integers."""

    float_parts: tuple[FloatPart, ...] = option(
        FLOAT_PARTS,
        "parts with float32 weights: embedding, head, norms; linears must be named and are stored "
        "as integers instead",
        validator=attrs.fields(DecoderConfig).float_parts.validator,
        converter=tuple,
    )
    levels: Levels = option(
        "ternary",
        "values of a weight of a linear: ternary = {-1, 0, 1}, int8 = -127 to 127, times one "
        "fixed scale per matrix",
        validator=in_(("ternary", "int8")),
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _need_linears("direct", "stores linears as integers", self.float_parts)

    def planned(self) -> Planned:
        """Return the kinds of parts that the model has for an optimizer."""
        others = set(self.float_parts) - {"linears"}
        found = super().planned()
        kinds: set[TrainedPart] = {"stored", *found.kinds}
        if not (others or self.float_vectors):
            kinds.discard("float")
        return attrs.evolve(found, kinds=frozenset(kinds), matrices=bool(others - {"norms"}))


def _need_linears(model: str, why: str, float_parts: tuple[FloatPart, ...]) -> None:
    if "linears" not in float_parts:
        raise ValueError(
            f"'float_parts' must name linears because model {model} {why}; for linears that learn "
            "by votes use model decoder"
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
        active_when=(_HAS_MATRICES, unless("decay_steps", 0)),
    )
    decay_steps: int | None = option(
        None,
        "first steps, which have weight decay, half of all in the recipe; null = all steps",
        validator=optional(non_negative),
        active_when=(_HAS_MATRICES, when("weight_decay")),
    )


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
        "weight of the new gradient in the momentum; a schedule multiplies it",
        validator=and_(gt(0.0), le(1.0)),
    )
    tau: float = option(
        1e-8,
        "momentum at which a trit moves; with normalise a multiple of the gradient's root mean "
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
        "weight of the new squared gradient in its mean",
        validator=and_(gt(0.0), le(1.0)),
        active_when=_NORMALISES,
    )
    eps: float = option(1e-10, "added to that root", validator=gt(0.0), active_when=_NORMALISES)

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        levels = getattr(run.model.options, "levels", "ternary")
        if levels != "ternary":
            yield (
                "",
                f"bop flips ternary weights, but the model's levels are {levels}; use ternary "
                "levels, or dqt",
            )
