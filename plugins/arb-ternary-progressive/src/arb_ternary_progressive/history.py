"""What became of each stack: the history of a growing rack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import asdict, define, field, frozen

Trunk = Literal["none", "frozen", "qlora"]


@frozen(kw_only=True)
class StackRecord:
    """One stack's training. Nothing in it depends on the clock or on what a cache held.

    Attributes:
        stack_id: of the stack, which does not change when others are prepended.
        index: in the order of building, from 0.
        position: in the order of computation, when it was trained.
        blocks: how many it has.
        precision: what it is stored in.
        trunk: what learned below or above it: ``none`` (there was no trunk), ``frozen`` or
            ``qlora``.
        time_step: the time step that it was trained at; None where time is an input.
        steps: optimizer steps.
        tokens: positions that counted in the losses.
        first_loss: of its first step.
        last_loss: of its last step.
        mean_loss: over its steps.
        skipped: micro-batches without a finite loss.
    """

    stack_id: int
    index: int
    position: int
    blocks: int
    precision: str
    trunk: Trunk
    time_step: int | None
    steps: int
    tokens: int
    first_loss: float | None
    last_loss: float | None
    mean_loss: float | None
    skipped: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> StackRecord:
        """What :meth:`to_json` gave."""
        return cls(**state)


@define
class Progress:
    """The running numbers of a stack in training."""

    steps: int = 0
    tokens: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    loss_sum: float = field(default=0.0)

    def add(self, loss: float, tokens: int) -> None:
        """One optimizer step has been taken."""
        self.steps += 1
        self.tokens += tokens
        self.last_loss = loss
        self.loss_sum += loss
        if self.first_loss is None:
            self.first_loss = loss

    @property
    def mean_loss(self) -> float | None:
        """Mean over the steps."""
        return self.loss_sum / self.steps if self.steps else None

    def numbers(self) -> dict[str, Any]:
        """The fields of a :class:`StackRecord` that are known from the steps."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            "mean_loss": self.mean_loss,
        }

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        """What :meth:`state_dict` gave."""
        return cls(**state)
