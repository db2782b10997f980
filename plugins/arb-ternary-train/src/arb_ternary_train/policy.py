"""Step policies: components that decide, step by step, how a training loop continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from attrs import field, frozen
from attrs.validators import gt

from arb_ternary_train.schedules import scheduled_groups

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from arb_ternary_train.loop import TrainingLoop
    from arb_ternary_train.step import StepResult


@frozen(kw_only=True)
class Adjustment:
    """Changes of a policy to the options of a loop.

    Attributes:
        float_rate: factor on the rate that the schedule gives float parameters.
        ternary_rate: factor on the rate that the schedule gives ternary modules.
        grad_clip: replaces the loop's ``grad_clip``; ``configured`` leaves it.
    """

    float_rate: float = field(default=1.0, validator=gt(0.0))
    ternary_rate: float = field(default=1.0, validator=gt(0.0))
    grad_clip: float | Literal["configured"] | None = "configured"

    def apply(self, optimizer: Optimizer, rates: dict[str, float]) -> dict[str, float]:
        """Multiply the rates that the schedule has just set.

        Returns:
            The first rate of each kind of group; ``rates`` if no factor changes them.
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
    """Decides what a training loop does next, and how. Each loop has a policy of its own.

    A policy may take steps and undo them (``arb_ternary_train.loop_state.Snapshot``), replace the
    loop's optimizer (``TrainingLoop.use_optimizer``) and change rates and clipping
    (``TrainingLoop.adjustment``). It changes nothing of the run besides the loop: only what
    :meth:`advance` returns is recorded, and what the policy itself records.

    A policy with numbers for the result of its phase has a method ``counts()``, which returns them
    by name (:func:`add_counts`).
    """

    def begin(self, loop: TrainingLoop) -> None:
        """Prepare for ``loop``, which has been made. Its state may be loaded next."""
        ...

    def advance(self, loop: TrainingLoop) -> Sequence[StepResult]:
        """Train on at least one micro-batch, by ``loop.train_step()``.

        Returns:
            The results to report, in order, at least one. They are reported one after another, as
            if each had just happened. Evaluations, checkpoints and stops that are due in between
            follow after the last.
        """
        ...

    def before_step(self, loop: TrainingLoop) -> None:
        """Observe the gradients of a step before they are clipped and the optimizer steps."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides what comes next, in types that a checkpoint can hold."""
        ...

    def load_state_dict(self, loop: TrainingLoop, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken, with the optimizer of that moment.

        The state of the optimizer is loaded afterwards.
        """
        ...

    def close(self) -> None:
        """Release what the policy holds: the loop ends."""
        ...


def add_counts(total: dict[str, float], policy: StepPolicy | None) -> None:
    """Add the numbers of a policy, if it has ``counts()``, to those of earlier loops of a phase."""
    counts = getattr(policy, "counts", None)
    if counts is None:
        return
    for name, number in counts().items():
        total[name] = total.get(name, 0.0) + number
