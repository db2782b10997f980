"""What training asks of the components that only it knows, and what all others may have besides.

Training uses what they have, and says so where an option needs more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import field, frozen

from arb_ternary.protocols.runs import RunContext

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from arb_ternary.protocols.data import MaskedBatch
    from arb_ternary.specs import TrainedPart


@frozen
class CheckResult:
    """Outcome of a check: ``passed``, one sentence, and the numbers behind it.

    ``fails_run``: a run fails whose check has not passed; False where it is only told.
    """

    passed: bool
    summary: str
    metrics: Mapping[str, float] = field(factory=dict)
    fails_run: bool = True

    @property
    def verdict(self) -> str:
        """``passed``, ``FAILED``, or that it failed and the run goes on all the same."""
        if self.passed:
            return "passed"
        return "FAILED" if self.fails_run else "FAILED, which is only reported"


@runtime_checkable
class Check(Protocol):
    """Judges a finished run; a failed check makes ``arb train`` exit with 1, where
    ``CheckResult.fails_run``.
    """

    def check(self, context: RunContext) -> CheckResult: ...


@runtime_checkable
class ActivationCheckpointing(Protocol):
    """Can recompute activations in backward."""

    def set_activation_checkpointing(self, enabled: bool, threshold: int | None) -> None:
        """Switch it; ``threshold``: fewest predictions in a batch for which it is done, None =
        always.
        """
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
    """Chooses by itself what ``set_dtype`` converts; of other models everything float is
    converted.
    """

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
class ChecksModel(Protocol):
    """A phase that says before the run is written what of its options does not go with the
    model.
    """

    def check_model(self, model: nn.Module, where: str) -> None:
        """Raises ConfigError, which names ``where``, such as ``phases[1]``, and the option."""


@runtime_checkable
class ModelChangingPhase(Protocol):
    """What a phase has besides ``Phase`` when it adds blocks or replaces modules.

    Weights can only be loaded into a model of the right structure. So the structure is stored
    beside them, also after the phase has ended, and is made again before weights are loaded: to
    resume, to evaluate, to export.
    """

    def structure(self) -> dict[str, Any]:
        """A description of what the phase has made of the model so far; numbers, strings, lists and
        dicts.
        """

    def restore_structure(self, model: nn.Module, structure: Mapping[str, Any]) -> nn.Module:
        """Give ``model``, as it was before the phase, the structure described; returns it, or
        another in its place.
        """


@runtime_checkable
class OwnLosses(Protocol):
    """A masking strategy whose predictions are judged by something else than the cross entropy of
    ids.

    Attributes:
        loss_unit: what the loss is measured in, as a figure's axis says it: ``squared error a
            pixel``.
    """

    @property
    def loss_unit(self) -> str: ...

    def losses(self, output: Tensor, batch: MaskedBatch) -> Tensor:
        """Loss of each prediction, float32, flat, in the order of ``batch.loss_mask``; ``output``
        is the model's.
        """
        ...


@runtime_checkable
class BlockedLogits(Protocol):
    """A model whose logits need not be held all at once, because it can judge some rows of its last
    hidden state.
    """

    def computes_loss_in_blocks(self, predictions: int) -> bool:
        """Whether to do so for as many predictions; False where ``forward`` is to be called."""
        ...

    def hidden(self, inputs: Tensor, **arguments: Tensor) -> Tensor:
        """What logits are made of, ``[*targets.shape, D]``; arguments are those of ``forward``."""
        ...

    def mean_cross_entropy(self, hidden_MD: Tensor, targets_M: Tensor) -> Tensor:
        """Mean of the cross entropies of the logits of ``hidden``, at least one row: a float32
        scalar.
        """
        ...

    def cross_entropies(self, hidden_MD: Tensor, targets_M: Tensor) -> Tensor:
        """The cross entropy of each row, float32, without gradients."""
        ...


@runtime_checkable
class Scores(Protocol):
    """A masking strategy that knows more of a prediction than its loss: whether it is right, by how
    much it is off.
    """

    def scores(self, output: Tensor, batch: MaskedBatch) -> Mapping[str, Tensor]:
        """Numbers by name, of each prediction, flat, in the order of ``batch.loss_mask``.

        The names are the same for every batch. An evaluation reports the mean of each.
        """
        ...


@runtime_checkable
class SizedSamples(Protocol):
    """A data source whose samples have a size of their own, so that ``block_size`` means nothing to
    it.

    The class of its options has ``sized_samples = True``, so that a config which sets
    ``block_size`` is refused.

    Attributes:
        predictions_per_sample: predictions in each sample; of a sample that has one class, 1.
        prediction_noun: what reports call one, in the singular: ``image``.
    """

    @property
    def predictions_per_sample(self) -> int: ...

    @property
    def prediction_noun(self) -> str: ...


@runtime_checkable
class Baselines(Protocol):
    """A data source that knows what simple predictors reach on its held-out samples."""

    def baselines(self, block_size: int) -> Mapping[str, float]:
        """Losses in nats a prediction, by name, over the samples of a whole evaluation."""


@runtime_checkable
class ShardableBatches(Protocol):
    """``Batches`` of which one of several processes draws some without reading the others.

    Batches without these methods are all drawn, and those of other processes dropped.
    """

    def shard(self, rank: int, size: int, count: int) -> None:
        """Announce that of every ``count`` batches from the next on only those with index ``j`` and
        ``j % size == rank`` will be drawn.
        """

    def skip(self, count: int) -> None:
        """Advance as if the next ``count`` batches had been drawn."""


@runtime_checkable
class Attachments(Protocol):
    """A data source with what a trained model needs where the data is not at hand, such as names of
    its ids.
    """

    def attachments(self) -> Mapping[str, Any]:
        """Plain JSON by name; the run keeps each as ``<name>.json``, and exporters are given
        all.
        """


@runtime_checkable
class AddsParts(Protocol):
    """Options of a phase that adds parts to the model."""

    def added_parts(self, *, followed: bool) -> frozenset[TrainedPart]:
        """Kinds of the added parts that are to be trained, by this phase or, if it is ``followed``,
        by another.
        """
        ...


@runtime_checkable
class PlansSteps(Protocol):
    """Options of a phase that may take more steps than its ``steps`` says, or fewer."""

    def planned_steps(self, run: Any) -> int:
        """Most optimizer steps that the phase will take in the run of the ``RunConfig`` ``run``."""
        ...


@runtime_checkable
class PlansLoops(Protocol):
    """Options of a phase whose training loops, of which there are several, do not take its
    ``steps``.
    """

    @property
    def steps_of_loop(self) -> int | None:
        """Most optimizer steps of one loop; None where that shows only when the phase runs."""
        ...


@runtime_checkable
class ReservesIds(Protocol):
    """A masking strategy that puts an id of its own in the place of others.

    Where only those others are predicted, the class of its options has ``hides_tokens = True``, so
    that ``lr: auto``, which counts every token as a prediction, is refused.
    """

    def reserved_ids(self, vocabulary_size: int) -> Sequence[int]:
        """The ids that the data must not use."""


@runtime_checkable
class PlansState(Protocol):
    """An optimizer that says before its first step how many bytes of tensors it will keep, beside
    those inside it.
    """

    def planned_state_bytes(self) -> int: ...
