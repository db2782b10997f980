"""Protocols of training: where it meets components of other packages.

Optional methods of components are in :mod:`arb_ternary_train.capabilities`; step policies are in
:mod:`arb_ternary_train.policy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import field, frozen

from arb_ternary.protocols.runs import RunContext

if TYPE_CHECKING:
    from torch import Tensor, nn

    from arb_ternary.protocols.data import MaskedBatch


@frozen
class CheckResult:
    """Outcome of a check.

    Attributes:
        passed: whether the check passed.
        summary: the outcome in one sentence.
        metrics: the numbers behind it.
        fails_run: whether a failed check fails the run; False if it is only reported.
    """

    passed: bool
    summary: str
    metrics: Mapping[str, float] = field(factory=dict)
    fails_run: bool = True

    @property
    def verdict(self) -> str:
        """``passed``, ``FAILED``, or that the failure is only reported."""
        if self.passed:
            return "passed"
        return "FAILED" if self.fails_run else "FAILED, which is only reported"


@runtime_checkable
class Check(Protocol):
    """Judges a finished run. ``arb train`` exits with 1 if a check fails the run."""

    def check(self, context: RunContext) -> CheckResult: ...


@runtime_checkable
class ModelChangingPhase(Protocol):
    """A phase that adds blocks to the model or replaces modules.

    Weights can only be loaded into a model of the right structure. So the structure is stored with
    them, also after the phase has ended, and is restored before weights are loaded: to resume, to
    evaluate, to export.
    """

    def structure(self) -> dict[str, Any]:
        """Describe the structure of the model so far, in numbers, strings, lists and dicts."""

    def restore_structure(self, model: nn.Module, structure: Mapping[str, Any]) -> nn.Module:
        """Give ``model``, as it was before the phase, the structure described.

        Returns:
            The model, or another in its place.
        """


@runtime_checkable
class OwnLosses(Protocol):
    """A masking strategy that judges predictions by another loss than the cross entropy of ids.

    Attributes:
        loss_unit: unit of the loss, as on the axis of a figure: ``squared error per pixel``.
    """

    @property
    def loss_unit(self) -> str: ...

    def losses(self, output: Tensor, batch: MaskedBatch) -> Tensor:
        """Return the loss of each prediction, float32, flat, in the order of ``batch.loss_mask``.

        ``output`` is the model's.
        """
        ...


@runtime_checkable
class Scores(Protocol):
    """A masking strategy that has further numbers for a prediction, such as whether it is right."""

    def scores(self, output: Tensor, batch: MaskedBatch) -> Mapping[str, Tensor]:
        """Return numbers of each prediction by name, flat, in the order of ``batch.loss_mask``.

        The names are the same for every batch. An evaluation reports the mean of each.
        """
        ...


@runtime_checkable
class BlockedLogits(Protocol):
    """A model that can judge rows of its last hidden state, so that logits are not all in memory.

    Attributes of shapes: ``M`` rows, ``D`` features.
    """

    def computes_loss_in_blocks(self, predictions: int) -> bool:
        """Return whether to do so for this number of predictions; else ``forward`` is called."""
        ...

    def hidden(self, inputs: Tensor, **arguments: Tensor) -> Tensor:
        """Return what logits are made of, ``[*targets.shape, D]``; arguments as of ``forward``."""
        ...

    def mean_cross_entropy(self, hidden_MD: Tensor, targets_M: Tensor) -> Tensor:
        """Return the mean cross entropy of at least one row, a float32 scalar."""
        ...

    def cross_entropies(self, hidden_MD: Tensor, targets_M: Tensor) -> Tensor:
        """Return the cross entropy of each row, float32, without gradients."""
        ...


@runtime_checkable
class SizedSamples(Protocol):
    """A data source whose samples have a size of their own; ``block_size`` does not apply to it.

    The class of its options has ``sized_samples = True``, so that a config that sets
    ``block_size`` is refused.

    Attributes:
        predictions_per_sample: predictions in each sample; 1 for samples with one class.
        prediction_noun: what reports call one prediction, in the singular: ``image``.
    """

    @property
    def predictions_per_sample(self) -> int: ...

    @property
    def prediction_noun(self) -> str: ...


@runtime_checkable
class ShardableBatches(Protocol):
    """``Batches`` that allow one of several processes to draw its own without reading the others.

    Batches without these methods are all drawn, and those of other processes dropped.
    """

    def shard(self, rank: int, size: int, count: int) -> None:
        """Announce which batches will be drawn from the next batch on.

        Of every ``count`` batches only those with an index ``j`` with ``j % size == rank`` will be.
        """

    def skip(self, count: int) -> None:
        """Advance as if the next ``count`` batches had been drawn."""
