"""What a model may have beside ``forward``; training uses what there is and says so where an option needs more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

__all__ = ["ActivationCheckpointing", "CarriesState", "Castable", "LimitedLength", "TakesTime"]


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
