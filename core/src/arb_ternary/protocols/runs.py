"""Phases, exporters and checks: the components that act on a whole run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import field, frozen

if TYPE_CHECKING:
    from torch import nn

    from arb_ternary_train.context import RunContext

__all__ = ["Check", "CheckResult", "Exporter", "ModelChangingPhase", "Phase", "PhaseResult"]


@frozen
class PhaseResult:
    """What a phase leaves for the report: the number of optimizer steps and named final numbers."""

    steps: int
    metrics: Mapping[str, float] = field(factory=dict)


@runtime_checkable
class Phase(Protocol):
    """A stretch of a run. The config lists phases; they run in that order.

    ``run`` starts from a fresh phase or from what ``load_state_dict`` restored, polls ``context.stop_requested``
    between steps (``context.stop_if_requested()`` saves and leaves) and calls ``context.checkpoint_if_due()`` after
    each, and ``context.save_checkpoint()`` after the last. ``state_dict`` must then describe the phase completely
    (cursor, step, optimizer, schedules, micro-batches in flight), so that a resumed phase ends with the same bits.
    Values are nested dicts and lists of tensors, numbers, strings, booleans and None.
    """

    @property
    def name(self) -> str: ...

    def run(self, context: RunContext) -> PhaseResult: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class ModelChangingPhase(Protocol):
    """What a phase has besides :class:`Phase` when it changes the structure of the model: adds blocks, replaces
    modules.

    Weights can only be loaded into a model of the right structure. So the structure is stored beside them, also after
    the phase has ended, and is made again before weights are loaded: to resume, to evaluate, to export.
    """

    def structure(self) -> dict[str, Any]:
        """A description of what the phase has made of the model so far; numbers, strings, lists and dicts."""
        ...

    def restore_structure(self, model: nn.Module, structure: Mapping[str, Any]) -> nn.Module:
        """Give ``model``, as it was before the phase, the structure described; returns it, or another in its place."""
        ...


@runtime_checkable
class Exporter(Protocol):
    """Writes a model in another form."""

    def export(self, model: nn.Module, destination: Path, metadata: Mapping[str, Any]) -> None:
        """Write ``model`` to the file or folder ``destination``, atomically; an existing one is replaced only whole."""
        ...


@frozen
class CheckResult:
    """Outcome of a check: ``passed``, one sentence, and the numbers behind it."""

    passed: bool
    summary: str
    metrics: Mapping[str, float] = field(factory=dict)


@runtime_checkable
class Check(Protocol):
    """Judges a finished run; a failed check makes ``arb train`` exit with 1."""

    def check(self, context: RunContext) -> CheckResult: ...
