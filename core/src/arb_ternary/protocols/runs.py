"""Runs, as their parts see them, and the phases that they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import field, frozen

if TYPE_CHECKING:
    import torch
    from torch import nn


class RunContext(Protocol):
    """A run, as a phase, an observer and a check see it.

    Attributes:
        model: the model; a phase that changes its structure may put another in its place.
    """

    model: nn.Module

    @property
    def directory(self) -> Path:
        """Where the run writes."""

    @property
    def device(self) -> torch.device:
        """Where the model lives."""

    @property
    def seed(self) -> int: ...

    @property
    def step(self) -> int:
        """Optimizer steps taken in the whole run."""

    @property
    def phase_index(self) -> int:
        """Position of the current phase in the config's list."""

    @property
    def stop_requested(self) -> bool: ...

    def request_stop(self, reason: str) -> None:
        """Have the run save a checkpoint and end, as a signal would."""

    def stop_if_requested(self) -> None:
        """Save a checkpoint and raise ``Interrupted``, if somebody asked for it."""

    def checkpoint_if_due(self) -> None: ...

    def save_checkpoint(self) -> None: ...

    def note(self, text: str) -> None:
        """A lasting line for the person who watches."""

    def held_out_loss(self) -> float:
        """Loss on held-out samples at the end of the run, nats per prediction; evaluates where that
        is to be done.
        """


@frozen
class PhaseResult:
    """What a phase leaves for the report: the number of optimizer steps and named final numbers."""

    steps: int
    metrics: Mapping[str, float] = field(factory=dict)


@runtime_checkable
class Phase(Protocol):
    """A stretch of a run. The config lists phases; they run in that order.

    ``run`` starts from a fresh phase or from what ``load_state_dict`` restored, calls
    ``context.stop_if_requested()`` between steps, ``context.checkpoint_if_due()`` after each and
    ``context.save_checkpoint()`` after the last. ``state_dict`` must then describe the phase
    completely (cursor, step, optimizer, schedules, micro-batches in flight), so that a resumed
    phase ends with the same bits. Values are nested dicts and lists of tensors, numbers, strings,
    booleans and None.
    """

    @property
    def name(self) -> str: ...

    def run(self, context: RunContext) -> PhaseResult: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
