"""The protocols of a run and of the phases that it consists of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import field, frozen

if TYPE_CHECKING:
    import torch
    from torch import nn


class RunContext(Protocol):
    """A run, as a phase, a tracker and a check see it.

    Attributes:
        model: the model; a phase that changes its structure may replace it.
    """

    model: nn.Module

    @property
    def directory(self) -> Path:
        """The folder that the run writes to."""

    @property
    def device(self) -> torch.device:
        """The device of the model."""

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
        """Make the run save a checkpoint and end, as a signal does."""

    def stop_if_requested(self) -> None:
        """Save a checkpoint and raise ``Interrupted``, if a stop was requested."""

    def checkpoint_if_due(self) -> None: ...

    def save_checkpoint(self) -> None: ...

    def note(self, text: str) -> None:
        """Print a line for the user, which stays on the screen and in the log."""

    def held_out_loss(self) -> float:
        """Return the loss on held-out samples at the end of the run, in nats per prediction.

        It is evaluated if it is not known yet.
        """


@frozen
class PhaseResult:
    """The result of a phase for the report: number of optimizer steps, and final metrics."""

    steps: int
    metrics: Mapping[str, float] = field(factory=dict)


@runtime_checkable
class Phase(Protocol):
    """A part of a run. The config lists phases, and they run in that order.

    ``run`` starts from a new phase or from the state that ``load_state_dict`` restored. It calls
    ``context.stop_if_requested()`` between steps, ``context.checkpoint_if_due()`` after each step
    and ``context.save_checkpoint()`` after the last. At each of these calls ``state_dict`` must
    describe the phase completely (data cursor, step, optimizer, schedules, micro-batches in
    flight), so that a resumed phase ends with the same bits. Values are nested dicts and lists of
    tensors, numbers, strings, booleans and None.
    """

    @property
    def name(self) -> str: ...

    def run(self, context: RunContext) -> PhaseResult: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
