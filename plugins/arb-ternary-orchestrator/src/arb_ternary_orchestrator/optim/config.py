"""Options of the optimizers of float parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from attrs import evolve, frozen

from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.config.fields import without_effect
from arb_ternary.config.options import (
    Rule,
    default_choice,
    non_negative,
    option,
    optional,
    positive,
)
from arb_ternary.optim.protocol import Planned

#: Why weights of ternary modules are not predicted.
NOT_TRITS = "trits and other integer weights are integers; there is nothing to extrapolate"

_decay = Rule(
    "at least 0 and below 1", lambda value: 0 <= value < 1, {"minimum": 0, "exclusiveMaximum": 1}
)
_at_least_one = Rule("1 or greater", lambda value: value >= 1, {"minimum": 1})
_at_least_two = Rule("2 or greater", lambda value: value >= 2, {"minimum": 2})


@frozen(kw_only=True)
class _Decaying:
    """What all have whose decay acts on matrices alone."""

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterable[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        if planned is None or planned.matrices:
            return []
        return without_effect(self, "no float parameter of the model is a matrix", "weight_decay")


@frozen(kw_only=True)
class LionConfig(_Decaying):
    """Options of ``lion``."""

    lr: float = option(
        3e-4,
        "step of every element, a third to a tenth of AdamW's rate; a schedule multiplies it",
        validator=positive,
    )
    beta1: float = option(0.9, "share of the momentum in the direction of a step", validator=_decay)
    beta2: float = option(0.99, "decay of the momentum", validator=_decay)
    weight_decay: float = option(
        0.0,
        "decoupled decay of matrices, three to ten times AdamW's; vectors do not decay",
        validator=non_negative,
    )


@frozen(kw_only=True)
class SGDConfig(_Decaying):
    """Options of ``sgd``."""

    lr: float = option(
        0.01, "learning rate at the start; a schedule multiplies it", validator=positive
    )
    momentum: float = option(
        0.9, "decay of the sum of gradients that steps are made of; 0 = none", validator=_decay
    )
    nesterov: bool = option(False, "look one step ahead")
    weight_decay: float = option(
        0.0,
        "this times the weights is added to the gradients of matrices; vectors do not decay",
        validator=non_negative,
    )

    def __attrs_post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ValueError("'nesterov' needs a 'momentum' above 0")


@frozen(kw_only=True)
class SWATSConfig(_Decaying):
    """Options of ``swats``, and of ``SWATS`` in Python."""

    adam_lr: float = option(
        1e-3,
        "Adam's learning rate; a schedule multiplies it, and SGD's with it",
        validator=positive,
    )
    switch_threshold: float = option(
        1e-9,
        "a group switches when SGD's rate differs by less than this from its average",
        validator=positive,
    )
    min_steps_before_switch: int = option(
        1000,
        "steps of Adam before a group may switch; 0 = two, the least there can be",
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
    )

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        yield from super().validate_in_run(run, planned)
        rates = [phase.options.lr for phase in run.phases if hasattr(phase.options, "lr")]
        if rates and None not in rates:
            yield from without_effect(
                self, "every phase that trains has an 'lr' of its own", "adam_lr"
            )


@frozen(kw_only=True)
class WrapperConfig:
    """What the options of all wrappers have in common."""

    inner: OptimizerChoice = default_choice("adamw", "the optimizer that steps")

    @property
    def defers(self) -> bool:
        """Whether the wrapped optimizer may put a step off."""
        return bool(getattr(self.inner.options, "defers", False))

    def planned_for(self, name: str, planned: Planned) -> Planned:
        """What the wrapped optimizer is given of ``planned``: faults of other kinds of parts are
        the wrapper's.
        """
        return evolve(planned, kinds=planned.kinds & {"float"}, idle=planned.idle & {"float"})


@frozen(kw_only=True)
class AdaGCConfig(WrapperConfig):
    """Options of ``adagc``."""

    threshold: float = option(
        1.05,
        "largest norm of a parameter's gradient, as a multiple of its average",
        validator=_at_least_one,
    )
    decay: float = option(0.98, "of the average of a parameter's clipped norms", validator=_decay)
    warmup: int = option(
        100,
        "first gradients of a parameter, which are clipped globally and begin its average",
        validator=positive,
    )
    max_norm: float = option(
        1.0, "norm of all gradients together to which the warm-up clips", validator=positive
    )


@frozen(kw_only=True)
class GradientSmootherConfig(WrapperConfig):
    """Options of ``gradient_smoother``."""

    decay: float = option(0.9, "of the average of gradients", validator=_decay)


@frozen(kw_only=True)
class GradientNoiseConfig(WrapperConfig):
    """Options of ``gradient_noise``."""

    eta: float = option(0.01, "variance of the noise at the first step", validator=positive)
    gamma: float = option(
        0.55, "at step t, from 0, the variance is eta / (1 + t)**gamma", validator=non_negative
    )
    seed: int = option(0, "of the noise", validator=non_negative)


@frozen(kw_only=True)
class NowcastingConfig(WrapperConfig):
    """Options of ``nowcasting``."""

    method: Literal["linear", "geometric"] = option(
        "linear",
        "linear = a line through the snapshots; geometric = ways that shrink by a common ratio",
    )
    every: int = option(100, "steps between jumps", validator=positive)
    window: int = option(5, "snapshots that a jump is predicted from", validator=_at_least_two)
    spacing: int = option(4, "steps between snapshots", validator=positive)
    horizon: int = option(10, "steps that a jump goes ahead", validator=positive)
    trust_ratio: float | None = option(
        1.0,
        "longest jump of a parameter, as a multiple of its way over the window; null = any",
        validator=optional(positive),
    )

    def __attrs_post_init__(self) -> None:
        if fault := window_fault(self.method, self.every, self.window, self.spacing):
            raise ValueError(fault)

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        if planned is not None and planned.kinds - {"float"}:
            yield "", NOT_TRITS


def window_fault(method: str, every: int, window: int, spacing: int) -> str | None:
    """What is wrong with the snapshots of nowcasting; None where they will do."""
    if method == "geometric" and window < 3:
        return (
            "'window' must be 3 or greater with 'method': geometric, which compares ways "
            "between snapshots"
        )
    span = (window - 1) * spacing
    if span >= every:
        return (
            f"'every' must be greater than the {span} steps that {window} snapshots span, "
            f"{spacing} apart; {every} is "
            "not: snapshots from before a jump say nothing of the way after it"
        )
    return None
