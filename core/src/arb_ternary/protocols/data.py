"""Batches, masked batches, data sources and masking strategies: what passes between data and training.

Shapes: ``B`` samples a batch, ``S`` positions a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import field, frozen

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

__all__ = ["Batch", "DataSource", "MaskContext", "MaskedBatch", "MaskingStrategy", "Tokenizer"]


@frozen(eq=False)
class Batch:
    """Raw samples.

    Attributes:
        tokens: int64 ``[B, S + 1]``: ``S`` inputs and the token that follows the last.
        sample_ids: int64 ``[B]``: identity of each sample, the same in every epoch and independent of its row.
        extras: further tensors by name (first dimension ``B``).
    """

    tokens: Tensor
    sample_ids: Tensor
    extras: Mapping[str, Tensor] = field(factory=dict)


@frozen
class MaskContext:
    """Where in the run a batch is masked.

    Attributes:
        step: optimizer steps taken so far in the phase.
        seed: the run's seed.
        vocabulary_size: number of token ids.
        training: False in evaluation.
        depth: how far a model that grows has come: 0 with its first stack, 1 with its last; 1 for an ordinary run.
        time: diffusion time in [0, 1], where the phase has one.
    """

    step: int
    seed: int
    vocabulary_size: int
    training: bool = True
    depth: float = 1.0
    time: float | None = None


@frozen(eq=False)
class MaskedBatch:
    """What the model sees and what it is asked.

    Attributes:
        inputs: int64 ``[B, S]``.
        targets: int64 ``[B, S]``.
        loss_mask: bool ``[B, S]``: positions that count in the loss.
        times: float32 ``[B]``: the time in [0, 1] of each sample, for a model that takes it as an input; None = there
            is none. Since interface 1.3.
    """

    inputs: Tensor
    targets: Tensor
    loss_mask: Tensor
    times: Tensor | None = None

    def to(self, device: torch.device) -> MaskedBatch:
        """The same on ``device``."""
        tensors = (self.inputs, self.targets, self.loss_mask, self.times)
        moved = (None if each is None else each.to(device, non_blocking=True) for each in tensors)
        return MaskedBatch(*moved)  # type: ignore[arg-type]


@runtime_checkable
class MaskingStrategy(Protocol):
    """Turns samples into inputs, targets and a loss mask; pure given its arguments.

    A strategy that puts a token of its own in the place of others has, besides ``apply``, a method
    ``reserved_ids(vocabulary_size) -> Sequence[int]``: the ids that the data must not use. Since interface 1.2.
    """

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        """Mask ``batch``; all randomness comes from ``generator`` or is a hash of sample id, time and seed."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocabulary_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def to_json(self) -> dict[str, Any]:
        """Everything needed to rebuild the tokenizer; stored in run directories and checkpoints."""
        ...


@runtime_checkable
class DataSource(Protocol):
    """Token streams for training and validation: one-dimensional integer arrays, memory-mapped where they are large."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def train(self) -> np.ndarray[Any, Any]: ...

    @property
    def validation(self) -> np.ndarray[Any, Any]: ...

    def fingerprint(self) -> str:
        """A digest of content and tokenizer; a resumed run must find the same."""
        ...
