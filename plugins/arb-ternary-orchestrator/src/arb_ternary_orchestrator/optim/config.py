"""Options of the optimizers of float parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import evolve, frozen

from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.config.options import (
    LARGEST_INT64,
    Condition,
    Rule,
    default_choice,
    non_negative,
    option,
    optional,
    positive,
)
from arb_ternary.optim.protocol import Planned

#: Why the weights of ternary modules are not predicted.
NOT_TRITS = "trits and other integer weights are integers; there is nothing to extrapolate"

_decay = Rule(
    "at least 0 and below 1", lambda value: 0 <= value < 1, {"minimum": 0, "exclusiveMaximum": 1}
)
_power = Rule("from 0 to 10", lambda value: 0 <= value <= 10, {"minimum": 0, "maximum": 10})


def at_least(least: int) -> Rule:
    """Return the validator of a number that is ``least`` or greater."""
    return Rule(f"{least} or greater", lambda value: value >= least, {"minimum": least})


_decays_matrices = Condition(
    lambda options, run, plan: plan is None or plan.matrices,
    "no float parameter of the model is a matrix",
)


def _some_phase_has_no_rate(options: Any, run: Any, plan: Any) -> bool:
    rates = [phase.options.lr for phase in run.phases if hasattr(phase.options, "lr")]
    return not rates or None in rates


@frozen(kw_only=True)
class LionConfig:
    """Options of ``lion``."""

    lr: float = option(
        3e-4,
        "step of every element, a third to a tenth of AdamW's rate; a schedule multiplies it",
        validator=positive,
    )
    beta1: float = option(
        0.9, "weight of the momentum in the direction of a step", validator=_decay
    )
    beta2: float = option(0.99, "decay of the momentum", validator=_decay)
    weight_decay: float = option(
        0.0,
        "decoupled decay of matrices, three to ten times AdamW's; vectors do not decay",
        validator=non_negative,
        active_when=_decays_matrices,
    )


@frozen(kw_only=True)
class SGDConfig:
    """Options of ``sgd``."""

    lr: float = option(
        0.01, "learning rate at the start; a schedule multiplies it", validator=positive
    )
    momentum: float = option(
        0.9, "decay of the sum of gradients that a step is made of; 0 = none", validator=_decay
    )
    nesterov: bool = option(False, "Nesterov momentum")
    weight_decay: float = option(
        0.0,
        "multiple of the weights that is added to the gradients of matrices; vectors do not decay",
        validator=non_negative,
        active_when=_decays_matrices,
    )

    def __attrs_post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ValueError("'nesterov' needs a 'momentum' above 0")


@frozen(kw_only=True)
class SWATSConfig:
    """Options of ``swats``, and of ``SWATS`` in Python."""

    adam_lr: float = option(
        1e-3,
        "Adam's learning rate; a schedule multiplies it, and SGD's with it",
        validator=positive,
        active_when=Condition(
            _some_phase_has_no_rate, "every phase that trains has an 'lr' of its own"
        ),
    )
    switch_threshold: float = option(
        1e-9,
        "a group switches when SGD's rate differs by less than this from its average",
        validator=positive,
    )
    min_steps_before_switch: int = option(
        1000,
        "steps of Adam before a group may switch; 0 = two, the minimum",
        validator=non_negative,
    )
    beta1: float = option(
        0.9, "decay of Adam's first moment, and momentum of SGD", validator=_decay
    )
    beta2: float = option(
        0.999, "decay of the second moment, and of the average of SGD's rate", validator=_decay
    )
    eps: float = option(1e-8, "added to the root of the second moment", validator=positive)
    weight_decay: float = option(
        0.0,
        "decoupled decay of matrices, as a multiple of Adam's rate in both phases",
        validator=non_negative,
        active_when=_decays_matrices,
    )


@frozen(kw_only=True)
class WrapperConfig:
    """Options that all wrappers have."""

    inner: OptimizerChoice = default_choice("adamw", "the optimizer that steps")

    @property
    def defers(self) -> bool:
        """Whether the wrapped optimizer may defer a step."""
        return bool(getattr(self.inner.options, "defers", False))

    def planned_for(self, name: str, planned: Planned) -> Planned:
        """Return the part of ``planned`` that the wrapped optimizer gets.

        Other kinds of parts are faults of the wrapper.
        """
        return evolve(planned, kinds=planned.kinds & {"float"}, idle=planned.idle & {"float"})


@frozen(kw_only=True)
class AdaGCConfig(WrapperConfig):
    """Options of ``adagc``."""

    threshold: float = option(
        1.05,
        "largest norm of a parameter's gradient, as a multiple of its average",
        validator=at_least(1),
    )
    decay: float = option(
        0.98, "decay of the average of a parameter's clipped norms", validator=_decay
    )
    warmup: int = option(
        100,
        "first gradients of a parameter, which are clipped globally and start its average",
        validator=positive,
    )
    max_norm: float = option(
        1.0, "norm that the warm-up clips all gradients together to", validator=positive
    )


@frozen(kw_only=True)
class GradientSmootherConfig(WrapperConfig):
    """Options of ``gradient_smoother``."""

    decay: float = option(0.9, "decay of the average of gradients", validator=_decay)


@frozen(kw_only=True)
class GradientNoiseConfig(WrapperConfig):
    """Options of ``gradient_noise``."""

    eta: float = option(0.01, "variance of the noise at the first step", validator=positive)
    gamma: float = option(
        0.55, "at step t, from 0, the variance is eta / (1 + t)**gamma", validator=_power
    )
    seed: int = option(0, "seed of the noise", validator=non_negative, largest=LARGEST_INT64)


@frozen(kw_only=True)
class NowcastingConfig(WrapperConfig):
    """Options of ``nowcasting``."""

    every: int = option(100, "steps between jumps", validator=positive)
    window: int = option(5, "snapshots that a jump is predicted from", validator=at_least(2))
    spacing: int = option(4, "steps between snapshots", validator=positive)
    horizon: int = option(10, "steps that a jump goes ahead", validator=positive)
    trust_ratio: float | None = option(
        1.0,
        "longest jump of a parameter, as a multiple of its distance over the window; null = any",
        validator=optional(positive),
    )

    def __attrs_post_init__(self) -> None:
        fault = window_fault(self.every, self.window, self.spacing)
        if fault is not None:
            raise ValueError(fault)

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """Yield contradictions; see ``arb_ternary.optim.protocol.Planned``."""
        if planned is not None and planned.kinds - {"float"}:
            yield "", NOT_TRITS


def window_fault(every: int, window: int, spacing: int) -> str | None:
    """Return what is wrong with the snapshots of nowcasting; None if nothing is."""
    span = (window - 1) * spacing
    if span >= every:
        return (
            f"'every' must be greater than the {span} steps that {window} snapshots span, "
            f"{spacing} apart; {every} is not: snapshots from before a jump do not predict what "
            f"follows it"
        )
    return None
