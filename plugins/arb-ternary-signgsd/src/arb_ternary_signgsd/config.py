"""Options of the optimizer ``signgsd``."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from arb_ternary.config.options import non_negative, option
from arb_ternary_votes.sign_votes import SignVotesConfig

__all__ = ["SignGSDConfig"]


@frozen(kw_only=True)
class SignGSDConfig:
    """Options of SignGSD; float parameters and ternary modules may be trained together."""

    lr: float = option(1e-2, "step of every element of a float parameter", validator=non_negative)
    weight_decay: float = option(
        0.0,
        "pull towards zero by sign: as a multiple of lr on float parameters, in votes an update on ternary modules",
        validator=non_negative,
    )
    maximize: bool = option(False, "climb instead of descend; float parameters only")
    foreach: bool | None = option(None, "update the float parameters of a group together; null = on accelerators only")
    nan_policy: Literal["error", "zero", "skip"] = option(
        "error", "a gradient that is NaN: error = stop, zero = a gradient of zero, skip = drop the step"
    )
    votes: SignVotesConfig = option(help="how ternary modules turn votes into flips", factory=SignVotesConfig)
