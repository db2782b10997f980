"""Options of the models and optimizers of this plugin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import attrs
from attrs import frozen
from attrs.validators import and_, ge, gt, lt

from arb_ternary.config.choice import ModelChoice
from arb_ternary.config.options import Condition, non_negative, option, optional, unless, when
from arb_ternary.optim.protocol import Planned
from arb_ternary_text.models.config import FLOAT_PARTS, DecoderConfig, FloatPart

_decay = and_(ge(0.0), lt(1.0))
_HAS_MATRICES: Final = Condition(
    lambda options, run, plan: plan is None or plan.matrices, "no float parameter is a matrix"
)


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
        if "linears" not in self.float_parts:
            raise ValueError(
                "'float_parts' must name linears because model bitnet rounds float weights of "
                "linears in each forward pass; for linears that learn by votes use model decoder"
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
