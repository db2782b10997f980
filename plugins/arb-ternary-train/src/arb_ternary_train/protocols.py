"""What training asks of the components that only it knows, and what all others may have besides.

Training uses what they have, and says so where an option needs more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import field, frozen

from arb_ternary.protocols.runs import RunContext

if TYPE_CHECKING:
    import torch
    from torch import nn

    from arb_ternary.specs import TrainedPart


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


@runtime_checkable
class ActivationCheckpointing(Protocol):
    """Can recompute activations in backward."""

    def set_activation_checkpointing(self, enabled: bool, threshold: int | None) -> None:
        """Switch it; ``threshold``: fewest predictions in a batch for which it is done, None = always."""
        ...


@runtime_checkable
class CarriesState(Protocol):
    """Can keep state from one batch to the next, such as a cache of keys and values."""

    def set_state_preservation(self, enabled: bool) -> None: ...

    def runtime_state(self) -> Any:
        """The state in plain values and tensors; None = there is none."""
        ...

    def load_runtime_state(self, state: Any) -> None: ...


@runtime_checkable
class Castable(Protocol):
    """Chooses by itself what ``set_dtype`` converts; of other models everything float is converted."""

    def set_dtype(self, dtype: torch.dtype) -> None: ...


@runtime_checkable
class LimitedLength(Protocol):
    """Takes samples of at most ``max_length`` positions."""

    @property
    def max_length(self) -> int: ...


@runtime_checkable
class TakesTime(Protocol):
    """``forward(inputs, time=...)`` takes ``MaskedBatch.times``, while ``takes_time``."""

    @property
    def takes_time(self) -> bool: ...


@runtime_checkable
class ModelChangingPhase(Protocol):
    """What a phase has besides ``Phase`` when it adds blocks or replaces modules.

    Weights can only be loaded into a model of the right structure. So the structure is stored beside them, also after
    the phase has ended, and is made again before weights are loaded: to resume, to evaluate, to export.
    """

    def structure(self) -> dict[str, Any]:
        """A description of what the phase has made of the model so far; numbers, strings, lists and dicts."""

    def restore_structure(self, model: nn.Module, structure: Mapping[str, Any]) -> nn.Module:
        """Give ``model``, as it was before the phase, the structure described; returns it, or another in its place."""


@runtime_checkable
class Baselines(Protocol):
    """A data source that knows what simple predictors reach on its held-out samples."""

    def baselines(self, block_size: int) -> Mapping[str, float]:
        """Losses in nats a prediction, by name, over the samples of a whole evaluation."""


@runtime_checkable
class Attachments(Protocol):
    """A data source with what a trained model needs where the data is not at hand, such as names of its ids."""

    def attachments(self) -> Mapping[str, Any]:
        """Plain JSON by name; the run keeps each as ``<name>.json``, and exporters are given all."""


@runtime_checkable
class AddsParts(Protocol):
    """Options of a phase that adds parts to the model."""

    def added_parts(self, *, followed: bool) -> frozenset[TrainedPart]:
        """Kinds of the added parts that are to be trained, by this phase or, if it is ``followed``, by another."""
        ...


@runtime_checkable
class ReservesIds(Protocol):
    """A masking strategy that puts an id of its own in the place of others."""

    def reserved_ids(self, vocabulary_size: int) -> Sequence[int]:
        """The ids that the data must not use."""


@runtime_checkable
class PlansState(Protocol):
    """An optimizer that says before its first step how many bytes of tensors it will keep, beside those inside it."""

    def planned_state_bytes(self) -> int: ...
