"""What passes between data and training: batches, what masking makes of them, and where both come
from.

Shapes: ``B`` samples a batch, ``S`` predictions a sample.
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
        data: ``[B, ...]``, of the source's own kind: windows of a stream of ids are int64 ``[B, S +
            1]``, ``S`` inputs and the id that follows the last. Only the masking strategy looks
            inside.
        sample_ids: int64 ``[B]``: identity of each sample, the same in every epoch and independent
            of its row.
        extras: further tensors by name (first dimension ``B``).
    """

    data: Tensor
    sample_ids: Tensor
    extras: Mapping[str, Tensor] = field(factory=dict)


@frozen
class BatchRequest:
    """The batches that training asks for.

    Attributes:
        batch_size: ``B``.
        block_size: ``S``; a source whose samples have a size of their own ignores it.
        seed: chooses the order.
        order: ``random``, or ``sequential``: each row of a batch continues the same row of the
            batch before.
        workers: threads that read ahead; 0 = none.
        pin_memory: page-locked memory, from which a copy to the accelerator can run beside
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
    """An endless iterator over batches in the memory of the host; the same request gives the same
    batches.
    """

    @property
    def continues(self) -> bool:
        """Whether the next batch continues the last one, so that a model may keep its state."""

    def __next__(self) -> Batch: ...

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is, in plain values; batches that were read ahead do not count."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken; DataError where it was of other data or another
        request.
        """

    def close(self) -> None:
        """Stop reading ahead."""


@runtime_checkable
class DataSource(Protocol):
    """What a model is trained and judged on."""

    @property
    def name(self) -> str: ...

    @property
    def vocabulary_size(self) -> int:
        """Ids, or classes, that a prediction chooses among; the model is built for so many."""

    def fingerprint(self) -> str:
        """A digest of everything in it; a resumed run must find the same."""

    def batches(self, request: BatchRequest) -> Batches:
        """Training samples; DataError where there are too few."""

    def samples_per_epoch(self, block_size: int) -> int:
        """Training samples of ``block_size`` predictions in one pass."""

    def held_out(self, batch_size: int, block_size: int, limit: int | None) -> Iterator[Batch]:
        """The same samples at every evaluation, in order; of at most ``limit`` batches, spread
        evenly over all.
        """


@frozen
class MaskContext:
    """Where in the run a batch is masked. A phase whose own strategies need more passes a subclass.

    Attributes:
        step: optimizer steps taken so far in the phase.
        seed: the run's seed.
        vocabulary_size: of the data source.
        training: False in evaluation.
    """

    step: int
    seed: int
    vocabulary_size: int
    training: bool = True


@frozen(eq=False)
class MaskedBatch:
    """What the model sees and what it is asked.

    Attributes:
        inputs: ``[B, ...]``; ids are int64 ``[B, S]``.
        targets: int64 ``[B]`` or ``[B, S]``: the id that each prediction should choose; a strategy
            that judges predictions itself has targets of its own kind.
        loss_mask: bool, an element a prediction: those that count in the loss. Of the shape of such
            ids.
        times: float32 ``[B]``: the time in [0, 1] of each sample, for a model that takes it as an
            input; None = there is none.
        arguments: further keyword arguments of the model's forward pass, first dimension ``B``.
    """

    inputs: Tensor
    targets: Tensor
    loss_mask: Tensor
    times: Tensor | None = None
    arguments: Mapping[str, Tensor] = field(factory=dict)

    def to(self, device: torch.device) -> MaskedBatch:
        """The same on ``device``."""
        tensors = (self.inputs, self.targets, self.loss_mask, self.times)
        moved = (None if each is None else each.to(device, non_blocking=True) for each in tensors)
        arguments = {
            name: each.to(device, non_blocking=True) for name, each in self.arguments.items()
        }
        return MaskedBatch(*moved, arguments=arguments)  # type: ignore[arg-type, misc]


@runtime_checkable
class MaskingStrategy(Protocol):
    """Turns samples into inputs, targets and a loss mask; pure given its arguments."""

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        """Mask ``batch``; all randomness comes from ``generator`` or is a hash of sample id, time
        and seed.
        """
