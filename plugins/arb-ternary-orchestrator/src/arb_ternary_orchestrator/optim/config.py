"""Options of the optimizers of float parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import frozen

from arb_ternary.config.fields import without_effect
from arb_ternary.config.options import Rule, non_negative, option, positive
from arb_ternary.optim.protocol import Planned

__all__ = ["LionConfig"]

_decay = Rule("at least 0 and below 1", lambda value: 0 <= value < 1, {"minimum": 0, "exclusiveMaximum": 1})


@frozen(kw_only=True)
class _Decaying:
    """What all have whose decay acts on matrices alone."""

    def contradictions_in(self, run: Any, planned: Planned | None) -> Iterable[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        if planned is None or planned.matrices:
            return []
        return without_effect(self, "no float parameter of the model is a matrix", "weight_decay")


@frozen(kw_only=True)
class LionConfig(_Decaying):
    """Options of Lion (Chen et al., 2023)."""

    lr: float = option(
        1e-4, "step of every element, a third to a tenth of AdamW's rate; a schedule multiplies it", validator=positive
    )
    beta1: float = option(0.9, "share of the momentum in the direction of a step", validator=_decay)
    beta2: float = option(0.99, "decay of the momentum", validator=_decay)
    weight_decay: float = option(
        0.0, "decoupled decay of matrices, three to ten times AdamW's; vectors do not decay", validator=non_negative
    )
