"""Options of the optimizer ``signgsd``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

from attrs import frozen

from arb_ternary.config.options import non_negative, option, trains
from arb_ternary.optim.protocol import Planned
from arb_ternary_votes.config import SignVotesConfig

#: Largest number of decay votes per update: that of a full accumulator.
MAX_DECAY: Final = 127.0

_TRAINS_FLOATS: Final = trains(
    "float",
    reason="the model has no float parameters, and the rate of ternary modules is 'votes.lr'",
)


@frozen(kw_only=True)
class SignGSDConfig:
    """Options of SignGSD; float parameters and ternary modules may be trained together."""

    lr: float = option(
        1e-2,
        "size of the step of every element of a float parameter",
        validator=non_negative,
        active_when=_TRAINS_FLOATS,
    )
    weight_decay: float = option(
        0.0,
        "decay towards zero by sign: a multiple of lr for float parameters, votes per update for "
        "ternary modules",
        validator=non_negative,
    )
    maximize: bool = option(False, "maximize the loss instead of minimizing it; float models only")
    foreach: bool | None = option(
        None,
        "update the float parameters of a group together; null = on accelerators only",
        active_when=_TRAINS_FLOATS,
    )
    nan_policy: Literal["error", "zero", "skip"] = option(
        "error",
        "what to do if a gradient is NaN: error = stop, zero = use a gradient of zero, skip = drop "
        "the step",
    )
    votes: SignVotesConfig = option(
        help="how ternary modules turn votes into flips", factory=SignVotesConfig
    )

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """Yield contradictions with the run; see ``arb_ternary.optim.protocol.Planned``."""
        if planned is None or "ternary" not in planned.kinds:
            return
        if self.maximize:
            yield (
                "maximize",
                "ternary modules vote for a lower loss and cannot maximize it; negate the loss",
            )
        if self.weight_decay > MAX_DECAY:
            yield (
                "weight_decay",
                f"must be at most {MAX_DECAY:g} votes per update for ternary modules, not "
                f"{self.weight_decay:g}",
            )
