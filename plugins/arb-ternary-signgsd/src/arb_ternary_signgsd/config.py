"""Options of the optimizer ``signgsd``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

from attrs import frozen

from arb_ternary.config.fields import without_effect
from arb_ternary.config.options import non_negative, option
from arb_ternary.optim.protocol import Planned
from arb_ternary_votes.config import SignVotesConfig

#: More decay votes than an accumulator holds mean no more than a full one.
MAX_DECAY: Final = 127.0


@frozen(kw_only=True)
class SignGSDConfig:
    """Options of SignGSD; float parameters and ternary modules may be trained together."""

    lr: float = option(1e-2, "step of every element of a float parameter", validator=non_negative)
    weight_decay: float = option(
        0.0,
        "pull towards zero by sign: as a multiple of lr on float parameters, in votes an update on "
        "ternary modules",
        validator=non_negative,
    )
    maximize: bool = option(False, "climb instead of descend; float parameters only")
    foreach: bool | None = option(
        None, "update the float parameters of a group together; null = on accelerators only"
    )
    nan_policy: Literal["error", "zero", "skip"] = option(
        "error",
        "a gradient that is NaN: error = stop, zero = a gradient of zero, skip = drop the step",
    )
    votes: SignVotesConfig = option(
        help="how ternary modules turn votes into flips", factory=SignVotesConfig
    )

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``; that of ``votes`` is asked too."""
        if planned is None:
            return
        if "ternary" in planned.kinds:
            if self.maximize:
                yield (
                    "maximize",
                    "ternary modules vote towards a lower loss and cannot be maximized; negate the "
                    "loss",
                )
            if self.weight_decay > MAX_DECAY:
                most = f"{MAX_DECAY:g} votes an update"
                yield (
                    "weight_decay",
                    f"must be at most {most} on ternary modules, not {self.weight_decay:g}",
                )
        if "float" not in planned.kinds:
            reason = (
                "the model has no float parameters, and the rate of ternary modules is 'votes.lr'"
            )
            yield from without_effect(self, reason, "lr", "foreach")
