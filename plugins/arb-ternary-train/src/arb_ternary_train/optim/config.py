"""Options of the optimizers ``adamw`` and ``split``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import evolve, frozen
from attrs.validators import and_, ge, gt, lt

from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.config.options import Condition, default_choice, option
from arb_ternary.optim.protocol import Planned

_decay = and_(ge(0.0), lt(1.0))


@frozen(kw_only=True)
class AdamWConfig:
    """Options of AdamW (Loshchilov and Hutter, 2019)."""

    lr: float = option(
        1e-3, "Learning rate at the start; a schedule multiplies it.", validator=gt(0.0)
    )
    beta1: float = option(0.9, "Decay of the first moment.", validator=_decay)
    beta2: float = option(0.95, "Decay of the second moment.", validator=_decay)
    eps: float = option(1e-8, "Added to the root of the second moment.", validator=gt(0.0))
    weight_decay: float = option(
        0.01,
        "Decoupled decay of matrices; vectors (gains, biases) do not decay.",
        validator=ge(0.0),
        active_when=Condition(
            lambda options, run, plan: plan is None or plan.matrices,
            "no float parameter of the model is a matrix",
        ),
    )


@frozen(kw_only=True)
class SplitConfig:
    """Options of ``split``: which optimizer trains which part."""

    ternary: OptimizerChoice = default_choice("scaled_votes", "Optimizer of the ternary modules.")
    float: OptimizerChoice = default_choice("adamw", "Optimizer of the float parameters.")

    @property
    def defers(self) -> bool:
        """Whether one of the two may defer a step."""
        return any(getattr(part.options, "defers", False) for part in (self.ternary, self.float))

    def planned_for(self, name: str, planned: Planned) -> Planned:
        """Return what the optimizer ``name`` is given of ``planned``."""
        return evolve(planned, kinds=planned.kinds & {name}, idle=planned.idle & {name})

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """Yield the optimizers whose parts the model lacks."""
        for name in ("ternary", "float"):
            if planned is not None and name not in planned.kinds | planned.idle:
                yield (
                    name,
                    f"the model has no {name} parts to train; name the other optimizer alone, "
                    f"without 'split'",
                )
