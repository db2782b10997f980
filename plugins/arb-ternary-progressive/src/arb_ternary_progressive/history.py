"""The history of a growing rack: a record of the training of each stack."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from attrs import asdict, define, frozen

Trunk: TypeAlias = Literal["none", "frozen", "qlora"]


@frozen(kw_only=True)
class StackRecord:
    """The training of one stack. Nothing in it depends on the clock or on the cache.

    Attributes:
        stack_id: id of the stack, which does not change when others are prepended.
        index: index of the stack in the order of building, from 0.
        position: place of the stack in the order of computation, when it was trained.
        blocks: number of blocks.
        precision: format of its linears.
        trunk: what learned in the trunk: ``none`` (there was no trunk), ``frozen`` or ``qlora``.
        time_step: time step that it was trained at; None if time is an input.
        steps: optimizer steps.
        tokens: positions that counted in the losses.
        first_loss: loss of the first step.
        last_loss: loss of the last step.
        mean_loss: mean loss of all steps.
        skipped: micro-batches without a finite loss or gradient.
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
        """Return plain numbers and strings."""
        return asdict(self)


@define
class Progress:
    """Running totals of the stack in training."""

    steps: int = 0
    tokens: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    loss_sum: float = 0.0

    def add(self, loss: float, tokens: int) -> None:
        """Count one optimizer step."""
        self.steps += 1
        self.tokens += tokens
        self.last_loss = loss
        self.loss_sum += loss
        if self.first_loss is None:
            self.first_loss = loss

    @property
    def mean_loss(self) -> float | None:
        """Mean loss of the steps so far; None before the first."""
        return self.loss_sum / self.steps if self.steps else None
