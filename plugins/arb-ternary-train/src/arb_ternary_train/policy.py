"""What may decide, step by step, how a training loop goes on: components of the kind ``policy``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from attrs import field, frozen
from attrs.validators import gt

from arb_ternary.errors import ArbError
from arb_ternary_train.schedules import scheduled_groups

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from arb_ternary_train.loop import TrainingLoop
    from arb_ternary_train.step_report import StepReport


@frozen
class Skip:
    """A micro-batch that was dropped, because its ``what`` (``loss`` or ``gradient``) was
    ``value``.
    """

    what: str
    value: float
    microbatch: int


@frozen
class Drawn:
    """What became of a micro-batch, or of those that are drawn together.

    Attributes:
        report: the step that was taken with it; None where the step needs more of them.
        skips: what was dropped, in order: a micro-batch without a finite loss, and then perhaps the
            step's gradients.
    """

    report: StepReport | None = None
    skips: tuple[Skip, ...] = ()

    @property
    def skip(self) -> Skip | None:
        """The first of the skips."""
        return self.skips[0] if self.skips else None


class Diverged(ArbError):
    """Too many micro-batches in a row had no finite loss, or no finite gradient.

    Attributes:
        skip: the last of them.
        earlier: those before it that were found together with it.
    """

    def __init__(self, what: str, hint: str, skip: Skip, earlier: tuple[Skip, ...] = ()) -> None:
        super().__init__(what, hint)
        self.skip = skip
        self.earlier = earlier


@frozen(kw_only=True)
class Adjustment:
    """What a policy makes of a loop's options.

    Attributes:
        float_rate: factor on the rate that the schedule gives float parameters.
        ternary_rate: factor on that of ternary modules.
        grad_clip: in the place of the loop's ``grad_clip``; ``configured`` = as that says.
    """

    float_rate: float = field(default=1.0, validator=gt(0.0))
    ternary_rate: float = field(default=1.0, validator=gt(0.0))
    grad_clip: float | Literal["configured"] | None = "configured"

    def apply(self, optimizer: Optimizer, rates: dict[str, float]) -> dict[str, float]:
        """Multiply what the schedule has just set; the first rate of each kind, ``rates`` where
        none changes.
        """
        factors = {"float": self.float_rate, "ternary": self.ternary_rate}
        if set(factors.values()) == {1.0}:
            return rates
        adjusted: dict[str, float] = {}
        for group in scheduled_groups(optimizer):
            kind = group.get("kind", "float")
            group["lr"] = group["lr"] * factors[kind]
            adjusted.setdefault("lr" if kind == "float" else "rate", float(group["lr"]))
        return adjusted


@runtime_checkable
class StepPolicy(Protocol):
    """Decides what a loop does next, and how. Each loop has one of its own.

    It may try steps and take them back (``arb_ternary_train.snapshot``), put another optimizer in
    the place of the loop's (``TrainingLoop.use_optimizer``) and change rates and clipping
    (``TrainingLoop.adjustment``). Of the run it leaves alone what is not the loop's: nothing is
    written down but what :meth:`advance` returns, and what the policy itself has to say.

    ``state_dict`` and ``load_state_dict`` are as those of a phase: a resumed run ends with the same
    bits.
    """

    def begin(self, loop: TrainingLoop) -> None:
        """``loop`` has been made. Its state may be loaded next, and that of the policy before
        it.
        """
        ...

    def advance(self, loop: TrainingLoop) -> Sequence[Drawn]:
        """Train on one micro-batch at least (``loop.draw``); what is to be told of it, in order, at
        least one.

        All of them are told one after the other, as if they had just happened. Evaluations and
        checkpoints that are due in between are made after the last, and so is a stop.
        """
        ...

    def before_step(self, loop: TrainingLoop) -> None:
        """The optimizer is about to be asked for a step; gradients are not yet clipped."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what comes next, in what a checkpoint can hold."""
        ...

    def load_state_dict(self, loop: TrainingLoop, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken, with the optimizer of that moment; its own state is
        loaded after.
        """
        ...

    def close(self) -> None:
        """The loop ends."""
        ...


@runtime_checkable
class Counts(Protocol):
    """A policy with numbers for the result of its phase."""

    def counts(self) -> Mapping[str, float]:
        """The numbers, by names of their own."""
        ...


def add_counts(total: dict[str, float], policy: StepPolicy | None) -> None:
    """Add the numbers of a policy, if it has any, to those of the loops before it in its phase."""
    counts: Mapping[str, float] = policy.counts() if isinstance(policy, Counts) else {}
    for name, number in counts.items():
        total[name] = total.get(name, 0.0) + number
