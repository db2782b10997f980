"""The records and protocols of data: batches, data sources, masking strategies.

Shapes: ``B`` samples per batch, ``S`` predictions per sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from attrs import field, frozen

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@frozen(eq=False)
class Batch:
    """Raw samples.

    Attributes:
        data: ``[B, ...]``, in the format of the source. Windows of a stream of ids are int64 ``[B,
            S + 1]``: ``S`` inputs and the id that follows the last. Only the masking strategy reads
            it.
        sample_ids: int64 ``[B]``: identity of each sample, the same in every epoch and in any row.
        extras: further tensors by name (first dimension ``B``).
    """

    data: Tensor
    sample_ids: Tensor
    extras: Mapping[str, Tensor] = field(factory=dict)


@frozen
class BatchRequest:
    """A request for batches.

    Attributes:
        batch_size: ``B``.
        block_size: ``S``; a source whose samples have a fixed size ignores it.
        seed: determines the order.
        order: ``random``, or ``sequential``: each row of a batch continues the same row of the
            batch before.
        workers: number of threads that read ahead; 0 = none.
        pin_memory: use page-locked memory, from which a copy to the accelerator can overlap with
            computation.
    """

    batch_size: int
    block_size: int
    seed: int
    order: Literal["random", "sequential"] = "random"
    workers: int = 0
    pin_memory: bool = False


@runtime_checkable
class Batches(Protocol):
    """An endless iterator over batches in host memory; equal requests give equal batches."""

    @property
    def continues(self) -> bool:
        """Whether the next batch continues the last one, so that a model may keep its state."""

    def __next__(self) -> Batch: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch in plain values.

        Batches that were read ahead do not count.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of ``state``.

        Raises:
            DataError: the state is that of other data or another request.
        """

    def close(self) -> None:
        """Stop reading ahead."""


@runtime_checkable
class DataSource(Protocol):
    """The data on which a model is trained and evaluated."""

    @property
    def name(self) -> str: ...

    @property
    def vocabulary_size(self) -> int:
        """Number of ids, or classes, that a prediction chooses from; the model is built for it."""

    def fingerprint(self) -> str:
        """Return a digest of the data; a resumed run must find the same."""

    def batches(self, request: BatchRequest) -> Batches:
        """Return training samples.

        Raises:
            DataError: there are too few.
        """

    def samples_per_epoch(self, block_size: int) -> int:
        """Return the number of training samples of ``block_size`` predictions in one pass."""

    def held_out(self, batch_size: int, block_size: int, limit: int | None) -> Iterator[Batch]:
        """Yield the same samples in the same order in every evaluation.

        ``limit`` is the largest number of batches, which are spread evenly over all samples.
        """


@frozen
class MaskContext:
    """The point of the run at which a batch is masked.

    A phase whose own strategies need more passes a subclass.

    Attributes:
        step: optimizer steps taken so far in the phase.
        seed: the seed of the run.
        vocabulary_size: that of the data source.
        training: False in evaluation.
    """

    step: int
    seed: int
    vocabulary_size: int
    training: bool = True


@frozen(eq=False)
class MaskedBatch:
    """Inputs and targets of a model.

    Attributes:
        inputs: ``[B, ...]``; ids are int64 ``[B, S]``.
        targets: int64 ``[B]`` or ``[B, S]``: the id that each prediction should choose. A strategy
            that computes the loss itself has targets in a format of its own.
        loss_mask: bool, one element per prediction, of the shape of such ids: which predictions
            count in the loss.
        times: float32 ``[B]``: the time in [0, 1] of each sample, for a model that takes it as an
            input; None if there is none.
        arguments: further keyword arguments of the forward pass of the model, first dimension
            ``B``.
    """

    inputs: Tensor
    targets: Tensor
    loss_mask: Tensor
    times: Tensor | None = None
    arguments: Mapping[str, Tensor] = field(factory=dict)

    def to(self, device: torch.device) -> MaskedBatch:
        """Return the batch on ``device``."""
        return MaskedBatch(
            inputs=self.inputs.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            loss_mask=self.loss_mask.to(device, non_blocking=True),
            times=None if self.times is None else self.times.to(device, non_blocking=True),
            arguments={
                name: each.to(device, non_blocking=True) for name, each in self.arguments.items()
            },
        )


@runtime_checkable
class MaskingStrategy(Protocol):
    """Turns samples into inputs, targets and a loss mask; a pure function of its arguments."""

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        """Mask ``batch``; all randomness comes from ``generator`` or is a hash of sample id, time
        and seed.
        """
