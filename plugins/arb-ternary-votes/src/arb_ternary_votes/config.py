"""Options of the vote rules. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

from attrs import frozen
from attrs.validators import and_, ge, gt, in_, instance_of, le, lt, optional

from arb_ternary.config.options import Condition, Rule, option, trains, unless, when
from arb_ternary.optim.protocol import Planned
from arb_ternary_votes.rate import AUTO

_threshold = and_(instance_of(int), ge(1), le(127))
_rate = Rule(
    "greater than 0, or auto", lambda value: value == AUTO or value > 0, {"exclusiveMinimum": 0}
)


def _if_ternary(holds: Callable[[Planned], bool], reason: str) -> Condition:
    """Return a condition on what the run trains; it also holds if no ternary module is trained."""

    def condition(options: Any, run: Any, plan: Planned | None) -> bool:
        return plan is None or "ternary" not in plan.kinds or holds(plan)

    return Condition(condition, reason)


_TERNARY: Final = trains("ternary", reason="the model has no ternary modules")
_EXPONENTS: Final = _if_ternary(
    lambda plan: plan.exponents, "no exponent of the model learns by votes"
)
_ACCUMULATES: Final = _if_ternary(
    lambda plan: plan.vote_bits != 2, "accumulators of 2 bits keep nothing after a step"
)
_HAS_THRESHOLD: Final = _if_ternary(
    lambda plan: plan.vote_bits != 2 or plan.exponents,
    "any vote flips a trit with accumulators of 2 bits",
)


@frozen(kw_only=True)
class SignVotesConfig:
    """Options of the sign-vote rule."""

    lr: float = option(
        1.0,
        "Rate of flips at the start; a schedule multiplies it. Thresholds are divided by it.",
        validator=gt(0.0),
        active_when=(_TERNARY, _HAS_THRESHOLD),
    )
    accum_threshold: int | None = option(
        None,
        "Votes that flip a trit, 1..127; null takes each module's own (32; 7 or 1 with vote_bits 4 "
        "or 2).",
        validator=optional(_threshold),
        active_when=_TERNARY,
    )
    e_accum_threshold: int | None = option(
        None,
        "Votes that move an exponent, 1..127; null takes each module's own (32).",
        validator=optional(_threshold),
        active_when=(_TERNARY, _EXPONENTS),
    )
    band: int = option(
        2,
        "How far an exponent may move from its initial value.",
        validator=ge(0),
        active_when=(_TERNARY, _EXPONENTS),
    )
    leak: int = option(
        0,
        "Every this many updates, accumulators move one unit towards zero; 0 is never.",
        validator=ge(0),
        active_when=(_TERNARY, _ACCUMULATES),
    )
    gain: float = option(
        0.0,
        "How strongly the loss signal lowers or raises the threshold; 0 is not at all.",
        validator=ge(0.0),
        active_when=(_TERNARY, _HAS_THRESHOLD),
    )

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """Yield the options that the model's accumulators cannot hold."""
        if planned is not None and "ternary" in planned.kinds:
            yield from _too_large("accum_threshold", self.accum_threshold, planned)


@frozen(kw_only=True)
class ScaledVotesConfig:
    """Options of the scaled-vote rule."""

    lr: float | Literal["auto"] = option(
        0.1,
        "Rate at the start: trits that a weight moves in a step whose gradient is one standard "
        "deviation. auto computes it from length, batch and schedule of the run and the width of "
        "the model, for training from random weights.",
        validator=_rate,
    )
    clip: float = option(
        2.5,
        "Largest normalised gradient of proportional votes, in standard deviations.",
        validator=gt(0.0),
        active_when=Condition(
            lambda options, run, plan: not options.votes_of_tail(plan),
            "votes of the tail are one quantum",
        ),
    )
    tail: bool | None = option(
        None,
        "Cast votes of one quantum if the gradient is in the tail of its distribution, as often as "
        "proportional ones; null = with 4-bit accumulators and float gradients, but not with "
        "vote_levels.",
        validator=optional(instance_of(bool)),
    )
    vote_levels: Literal[3] | None = option(
        None,
        "3 = a micro-batch's votes are -1, 0 or 1 in a unit as large as the clip, which take 1.6 "
        "bits per weight to send between ranks at any rate; their sum is rounded into quanta once "
        "per step. null = votes are quanta.",
        validator=optional(in_((3,))),
    )
    carry: bool = option(
        True,
        "A flip leaves the accumulator what exceeds the cell; false = it starts again in the "
        "middle of the cell.",
        validator=instance_of(bool),
        active_when=_ACCUMULATES,
    )
    leak: float = option(
        0.02,
        "Share of an accumulator that decays per step, times the rate.",
        validator=and_(ge(0.0), le(1.0)),
        active_when=_ACCUMULATES,
    )
    leak_every: int = option(
        1,
        "Accumulators decay every this many updates, by as many shares at once; the other updates "
        "need no random numbers.",
        validator=and_(instance_of(int), ge(1)),
        active_when=(_ACCUMULATES, when("leak", reason="nothing decays with a leak of 0")),
    )
    spread: bool = option(
        False,
        "Accumulators that are all 0, as those of a new model, begin anywhere in their cells, so "
        "that trits turn from the first votes on and not when a cell has filled.",
        validator=instance_of(bool),
        active_when=_ACCUMULATES,
    )
    orthogonal: bool = option(
        False,
        "Cast votes of linears, except the head, from a gradient that is half orthogonalised, so "
        "that all of its directions count. It learns more per token and takes more time per "
        "step, more in wide layers and small batches.",
        validator=instance_of(bool),
    )
    spectral_clip: bool = option(
        False,
        "Cast votes of linears, except the head, from a gradient whose 32 largest singular values "
        "(at most a quarter of all) are cut to the least of them. It has about the effect of "
        "orthogonal, in less time in wide layers.",
        validator=instance_of(bool),
    )
    magnitude_decay: float = option(
        0.98,
        "Decay of the running gradient magnitudes, per step.",
        validator=and_(ge(0.0), lt(1.0)),
    )
    cell: int | None = option(
        None,
        "Quanta per trit, 1..127; null takes 64, 7 or 1 for accumulators of 8, 4 or 2 bits.",
        validator=optional(and_(instance_of(int), ge(1), le(127))),
    )
    exponent_rate: float = option(
        0.05,
        "Rate of the exponents at the start: factors of two per step for a gradient of one "
        "standard deviation.",
        validator=gt(0.0),
        active_when=_EXPONENTS,
    )
    band: int = option(
        2,
        "How far an exponent may move from its initial value.",
        validator=ge(0),
        active_when=_EXPONENTS,
    )

    def votes_of_tail(self, planned: Planned | None) -> bool:
        """Return whether the run is known to cast votes of the tail."""
        if planned is None or "ternary" not in planned.kinds:
            return False
        if planned.integers or self.vote_levels:
            return False
        return planned.vote_bits == 4 if self.tail is None else self.tail

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """Yield the options that contradict each other, the run or the model."""
        if self.vote_levels and getattr(run.optimizer.options, "defers", False):
            yield (
                "vote_levels",
                f"cannot be combined with {run.optimizer.name}, which puts steps off: votes are "
                "summed until a step is taken, so those of a dropped micro-batch could not be "
                "removed",
            )
        if self.orthogonal and self.spectral_clip:
            yield (
                "spectral_clip",
                "true does not go with orthogonal: true: both choose what votes are cast from",
            )
        for name in ("orthogonal", "spectral_clip"):
            if getattr(self, name) and run.exact:
                yield (
                    name,
                    "true does not go with exact: true: votes are then cast from floats, whose "
                    "last bits differ between machines; leave one of them out",
                )

        if planned is None or "ternary" not in planned.kinds:
            return
        yield from _too_large("cell", self.cell, planned)
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
        if planned.vote_bits == 2 and self.lr == AUTO:
            yield (
                "lr",
                "auto is for accumulators of 8 or 4 bits; with 2 bits the rate is the probability "
                "of a flip; try 0.02",
            )


def _changes_rate(options: Any, run: Any, plan: Any) -> bool:
    """Return whether a phase of the run changes the rate."""
    if run is None:
        return True
    for phase in run.phases:
        constant = getattr(phase.options, "lr_schedule", "") in ("constant", "none")
        if not constant or phase.options.warmup_steps:
            return True
    return False


@frozen(kw_only=True)
class MomentumVotesConfig:
    """Options of momentum votes."""

    flip_rate: float = option(
        0.01,
        "Share of a module's trits that flip per step at the rate 1.",
        validator=and_(gt(0.0), le(1.0)),
    )
    power: float = option(
        1.0,
        "The share of flips follows the schedule's rate to this power; 0 keeps it constant.",
        validator=ge(0.0),
        active_when=Condition(_changes_rate, "no phase changes the rate"),
    )
    decay: float = option(
        0.05,
        "Share of the momentum that is lost per step, 1 - beta; 1 = no momentum.",
        validator=and_(ge(2.0**-16), le(1.0)),
    )
    quanta: float | None = option(
        None,
        "Votes for a gradient of one standard deviation; null takes the number that makes the "
        "momentum of noise 24 (8-bit accumulators) or 1.5 (4-bit) wide.",
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
        active_when=unless("decay", 1.0, reason="nothing is left of a momentum whose 'decay' is 1"),
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
        "Factors of two per step, for a gradient of one standard deviation at the rate 1.",
        validator=gt(0.0),
        active_when=_EXPONENTS,
    )
    band: int = option(
        2,
        "How far an exponent may move from its initial value.",
        validator=ge(0),
        active_when=_EXPONENTS,
    )

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """Yield what the model's accumulators cannot hold."""
        if planned is None or "ternary" not in planned.kinds:
            return
        if planned.vote_bits == 2:
            yield (
                "",
                "a momentum needs accumulators of 8 or 4 bits, and the model's vote_bits are 2; "
                "use scaled_votes",
            )
        yield from _too_large("quanta", self.quanta, planned)


def _too_large(name: str, value: float | None, planned: Planned) -> Iterator[tuple[str, str]]:
    """Yield the option ``name`` if accumulators cannot hold its value."""
    if value is not None and value > planned.largest_vote:
        yield (
            name,
            f"{value:g} does not fit accumulators of {planned.vote_bits} bits, which hold up to "
            f"{planned.largest_vote}; give less, or more vote_bits",
        )
