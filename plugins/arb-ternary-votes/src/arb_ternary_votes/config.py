"""Options of the rules, and what a run makes of them. Read without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs
from attrs import frozen
from attrs.validators import and_, ge, gt, in_, instance_of, le, lt, optional

from arb_ternary.config.fields import without_effect
from arb_ternary.config.options import Rule, option
from arb_ternary.optim.protocol import Planned
from arb_ternary_votes.rate import AUTO, rate_of

_threshold = and_(instance_of(int), ge(1), le(127))
_rate = Rule(
    "greater than 0, or auto", lambda value: value == AUTO or value > 0, {"exclusiveMinimum": 0}
)
_NO_EXPONENTS = "no exponent of the model learns by votes"


@frozen(kw_only=True)
class SignVotesConfig:
    """Options of the sign-vote rule."""

    lr: float = option(
        1.0,
        "Rate of flips at the start; a schedule multiplies it. Thresholds are divided by it.",
        validator=gt(0.0),
    )
    accum_threshold: int | None = option(
        None,
        "Votes that flip a trit, 1..127; null takes each module's own (32; 7 or 1 with vote_bits 4 "
        "or 2).",
        validator=optional(_threshold),
    )
    e_accum_threshold: int | None = option(
        None,
        "Votes that move an exponent, 1..127; null takes each module's own (32).",
        validator=optional(_threshold),
    )
    band: int = option(2, "How far an exponent may move from its initial value.", validator=ge(0))
    leak: int = option(
        0,
        "Every this many updates, accumulators move one unit towards zero; 0 is never.",
        validator=ge(0),
    )
    gain: float = option(
        0.0,
        "How strongly the loss signal lowers or raises the threshold; 0 is not at all.",
        validator=ge(0.0),
    )

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        if planned is None:
            return
        if "ternary" not in planned.kinds:
            names = [field.name for field in attrs.fields(SignVotesConfig)]
            yield from without_effect(self, "the model has no ternary modules", *names)
            return
        if self.accum_threshold is not None and self.accum_threshold > planned.largest_vote:
            yield "accum_threshold", _beyond(self.accum_threshold, planned)
        if not planned.exponents:
            yield from without_effect(self, _NO_EXPONENTS, "e_accum_threshold", "band")
        if planned.vote_bits == 2:
            yield from without_effect(
                self, "accumulators of 2 bits keep nothing after a step", "leak"
            )
            if not planned.exponents:
                yield from without_effect(
                    self, "any vote flips a trit with accumulators of 2 bits", "lr", "gain"
                )


@frozen(kw_only=True)
class ScaledVotesConfig:
    """Options of the scaled-vote rule."""

    lr: float | Literal["auto"] = option(
        0.1,
        "Rate at the start: trits that a weight moves in a step whose gradient is one standard "
        "deviation; auto = what length, batch and schedule of the run and the width of the model "
        "say, for training from random weights.",
        validator=_rate,
    )
    clip: float = option(
        2.5,
        "Largest normalised gradient of proportional votes, in standard deviations.",
        validator=gt(0.0),
    )
    tail: bool | None = option(
        None,
        "Votes of one quantum where the gradient is in the tail of its distribution, as often as "
        "proportional ones; "
        "null = with 4-bit accumulators and float gradients, but not with vote_levels.",
        validator=optional(instance_of(bool)),
    )
    vote_levels: Literal[3] | None = option(
        None,
        "3 = a micro-batch's votes are -1, 0 or 1 in a unit as large as the clip, which take 1.6 "
        "bits a weight to send between ranks at any rate; their sum is rounded into quanta once a "
        "step. null = votes are quanta.",
        validator=optional(in_((3,))),
    )
    carry: bool = option(
        True,
        "A flip leaves the accumulator what exceeds the cell; false = it starts again in the "
        "middle of the cell.",
        validator=instance_of(bool),
    )
    leak: float = option(
        0.02,
        "Share of an accumulator that decays each step, times the rate.",
        validator=and_(ge(0.0), le(1.0)),
    )
    leak_every: int = option(
        1,
        "Accumulators decay every this many updates, by as many shares at once; the others need no "
        "random numbers.",
        validator=and_(instance_of(int), ge(1)),
    )
    spread: bool = option(
        False,
        "Accumulators that are all 0, as those of a new model, begin anywhere in their cells, so "
        "that trits turn from the first votes on and not when a cell has filled.",
        validator=instance_of(bool),
    )
    orthogonal: bool = option(
        False,
        "Votes of linears, but not of the head, are of a gradient of which half is orthogonalised, "
        "so that all of its directions count. It learns more a token and takes more time a step, "
        "more in wide layers and small batches.",
        validator=instance_of(bool),
    )
    spectral_clip: bool = option(
        False,
        "Votes of linears, but not of the head, are of a gradient whose 32 largest singular values "
        "(at most a quarter of all) are cut to the least of them. It does about what orthogonal "
        "does, in less time in wide layers.",
        validator=instance_of(bool),
    )
    magnitude_decay: float = option(
        0.98,
        "Decay of the running gradient magnitudes, per step.",
        validator=and_(ge(0.0), lt(1.0)),
    )
    cell: int | None = option(
        None,
        "Quanta a trit, 1..127; null takes 64, 7 or 1 for accumulators of 8, 4 or 2 bits.",
        validator=optional(and_(instance_of(int), ge(1), le(127))),
    )
    exponent_rate: float = option(
        0.05,
        "Rate of the exponents at the start: factors of two a step, likewise.",
        validator=gt(0.0),
    )
    band: int = option(2, "How far an exponent may move from its initial value.", validator=ge(0))

    @property
    def auto_fields(self) -> tuple[str, ...]:
        """The options that are ``auto``."""
        return ("lr",) if self.lr == AUTO else ()

    def auto_values(self, plan: Any) -> Mapping[str, float]:
        """What ``auto`` is in a run with this training plan; see
        :func:`arb_ternary_votes.rate.rate_of`.
        """
        return {name: rate_of(plan) for name in self.auto_fields}

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        if self.vote_levels and getattr(run.optimizer.options, "defers", False):
            yield (
                "vote_levels",
                f"does not go with {run.optimizer.name}, which puts steps off: votes are summed "
                f"until a step is taken, "
                "and those of a micro-batch that it drops could not be told from the others",
            )
        if self.orthogonal and self.spectral_clip:
            yield (
                "spectral_clip",
                "true does not go with orthogonal: true: both say what votes are cast of",
            )
        for name in ("orthogonal", "spectral_clip"):
            if getattr(self, name) and run.exact:
                yield (
                    name,
                    "true does not go with exact: true: what votes are cast of is a float then, "
                    "whose last bits are not the same on every machine; leave one of them out",
                )
        if planned is None or "ternary" not in planned.kinds:
            return
        if self.cell is not None and self.cell > planned.largest_vote:
            yield "cell", _beyond(self.cell, planned)
        if self.tail and planned.integers:
            yield (
                "tail",
                "true does not go with gradients int8, whose votes are shifts by whole powers of "
                "two and cannot be set to any number; take gradients float, or leave tail out",
            )
        if self.tail and self.vote_levels:
            yield (
                "tail",
                "true does not go with vote_levels: votes of the tail are one quantum each, and "
                "those of vote_levels are as large as the clip; leave one of them out",
            )
        if not planned.exponents:
            yield from without_effect(self, _NO_EXPONENTS, "exponent_rate", "band")
        if (
            not planned.integers
            and not self.vote_levels
            and (planned.vote_bits == 4 if self.tail is None else self.tail)
        ):
            yield from without_effect(self, "votes of the tail are one quantum", "clip")
        if planned.vote_bits == 2:
            if self.lr == AUTO:
                yield (
                    "lr",
                    "auto is for accumulators of 8 or 4 bits, and with 2 a rate is a chance of "
                    "flips; try 0.02",
                )
            yield from without_effect(
                self,
                "accumulators of 2 bits keep nothing after a step",
                "carry",
                "leak",
                "leak_every",
                "spread",
            )
        elif not self.leak:
            yield from without_effect(self, "nothing decays with a leak of 0", "leak_every")


def _beyond(value: float, planned: Planned) -> str:
    return (
        f"{value:g} does not fit accumulators of {planned.vote_bits} bits, which hold up to "
        f"{planned.largest_vote}; give less, or more vote_bits"
    )


@frozen(kw_only=True)
class MomentumVotesConfig:
    """Options of momentum votes."""

    flip_rate: float = option(
        0.01,
        "Share of a module's trits that flip in a step at the rate 1.",
        validator=and_(gt(0.0), le(1.0)),
    )
    power: float = option(
        1.0,
        "The share of flips follows the schedule's rate to this power; 0 keeps it constant.",
        validator=ge(0.0),
    )
    decay: float = option(
        0.05,
        "Share of the momentum that is lost each step, 1 - beta; 1 = no momentum.",
        validator=and_(ge(2.0**-16), le(1.0)),
    )
    quanta: float | None = option(
        None,
        "Votes for a gradient of one standard deviation; null takes what makes the momentum of "
        "noise 24 (8-bit accumulators) or 1.5 (4-bit) wide.",
        validator=optional(and_(gt(0.0), le(127.0))),
    )
    clip: float = option(
        2.5, "Largest normalised gradient, in standard deviations.", validator=gt(0.0)
    )
    carry: bool = option(
        True,
        "A flip takes the threshold out of the momentum and leaves the rest; false = it leaves "
        "nothing.",
        validator=instance_of(bool),
    )
    gain: float = option(
        0.0625,
        "Octaves that the threshold rises in a step with twice the flips that it should have, "
        "1/256 to 1.",
        validator=and_(ge(2.0**-8), le(1.0)),
    )
    dead_band: float = option(
        0.05,
        "Relative error of a step's number of flips up to which the threshold stays.",
        validator=and_(ge(0.0), lt(1.0)),
    )
    magnitude_decay: float = option(
        0.98,
        "Decay of the running gradient magnitudes, per step.",
        validator=and_(ge(0.0), lt(1.0)),
    )
    exponent_rate: float = option(
        0.05,
        "Factors of two a step, for a gradient of one standard deviation at the rate 1.",
        validator=gt(0.0),
    )
    band: int = option(2, "How far an exponent may move from its initial value.", validator=ge(0))

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        phases = [phase.options for phase in run.phases]
        if all(
            getattr(each, "lr_schedule", "") in ("constant", "none") and not each.warmup_steps
            for each in phases
        ):
            yield from without_effect(self, "no phase changes the rate", "power")
        if self.decay == 1.0:
            yield from without_effect(
                self, "nothing is left of a momentum whose 'decay' is 1", "carry"
            )
        if planned is None or "ternary" not in planned.kinds:
            return
        if planned.vote_bits == 2:
            yield (
                "",
                "a momentum needs accumulators of 8 or 4 bits, and the model's vote_bits are 2; "
                "use scaled_votes",
            )
        if self.quanta is not None and self.quanta > planned.largest_vote:
            yield "quanta", _beyond(self.quanta, planned)
        if not planned.exponents:
            yield from without_effect(self, _NO_EXPONENTS, "exponent_rate", "band")
