"""Options of the rules of this plugin."""

from __future__ import annotations

from attrs import frozen
from attrs.validators import and_, ge, gt, instance_of, le, lt, optional

from arb_ternary.config.options import option

__all__ = ["MomentumVotesConfig"]


@frozen(kw_only=True)
class MomentumVotesConfig:
    """Options of momentum votes."""

    flip_rate: float = option(
        0.01,
        "Share of a module's trits that flip in a step at the rate 1.",
        validator=and_(gt(0.0), le(1.0)),
    )
    power: float = option(
        1.0, "The share of flips follows the schedule's rate to this power; 0 keeps it constant.", validator=ge(0.0)
    )
    decay: float = option(
        0.05,
        "Share of the momentum that is lost each step, 1 - beta; 1 = no momentum.",
        validator=and_(ge(2.0**-16), le(1.0)),
    )
    quanta: float | None = option(
        None,
        "Votes for a gradient of one standard deviation; null takes what makes the momentum of noise 24 (8-bit "
        "accumulators) or 1.5 (4-bit) wide.",
        validator=optional(and_(gt(0.0), le(127.0))),
    )
    clip: float = option(2.5, "Largest normalised gradient, in standard deviations.", validator=gt(0.0))
    carry: bool = option(
        True,
        "A flip takes the threshold out of the momentum and leaves the rest; false = it leaves nothing.",
        validator=instance_of(bool),
    )
    gain: float = option(
        0.0625,
        "Octaves that the threshold rises in a step with twice the flips that it should have, 1/256 to 1.",
        validator=and_(ge(2.0**-8), le(1.0)),
    )
    dead_band: float = option(
        0.05,
        "Relative error of a step's number of flips up to which the threshold stays.",
        validator=and_(ge(0.0), lt(1.0)),
    )
    magnitude_decay: float = option(
        0.98, "Decay of the running gradient magnitudes, per step.", validator=and_(ge(0.0), lt(1.0))
    )
    exponent_rate: float = option(
        0.05, "Factors of two a step, for a gradient of one standard deviation at the rate 1.", validator=gt(0.0)
    )
    band: int = option(2, "How far an exponent may move from its initial value.", validator=ge(0))
