"""The suite of a masking strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from attrs import evolve

from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch, MaskingStrategy
from arb_ternary_testing.component import ComponentCase
from arb_ternary_train.capabilities import reserved_ids

in_training_and_evaluation = pytest.mark.parametrize("training", [True, False])


class MaskingSuite(ComponentCase):
    """Tests that every :class:`~arb_ternary.protocols.data.MaskingStrategy` must pass.

    Subclass it and set ``component`` to the registered name (or override :meth:`make_strategy`).
    ``options`` are the component's options as in a config.

    Attributes:
        vocabulary_size: size of the vocabulary of the suite's batches.
        sizes: ``(B, S)`` of those batches.
    """

    kind: ClassVar[str] = "masking"
    vocabulary_size: ClassVar[int] = 37
    sizes: ClassVar[tuple[tuple[int, int], ...]] = ((1, 1), (1, 7), (6, 16), (5, 33))

    def make_strategy(self) -> MaskingStrategy:
        """Return a new instance of the strategy under test."""
        strategy: MaskingStrategy = self.build()
        return strategy

    def make_batch(self, rows: int, positions: int, seed: int = 0) -> Batch:
        """Return a batch of random tokens without reserved ids, some of which are ``learned``.

        Override it if the strategy needs other ``extras``.
        """
        rng = np.random.default_rng(seed)
        reserved = set(self._reserved_ids())
        allowed = [token for token in range(self.vocabulary_size) if token not in reserved]
        indices = rng.integers(0, len(allowed), (rows, positions + 1))
        tokens = np.array(allowed, np.int64)[indices]
        sample_ids = rng.permutation(10 * rows)[:rows]
        learned = rng.random(tokens.shape) < 0.5
        return Batch(
            data=torch.from_numpy(tokens),
            sample_ids=torch.from_numpy(sample_ids),
            extras={"learned": torch.from_numpy(learned)},
        )

    def make_context(self, **changes: Any) -> MaskContext:
        """Return a context in the middle of a run."""
        context = MaskContext(
            step=12,
            seed=5,
            vocabulary_size=self.vocabulary_size,
        )
        return evolve(context, **changes)

    def _reserved_ids(self) -> Sequence[int]:
        return reserved_ids(self.make_strategy(), self.vocabulary_size)

    def _apply(
        self,
        batch: Batch,
        context: MaskContext | None = None,
        seed: int = 3,
    ) -> MaskedBatch:
        """Return ``batch`` masked by a new strategy."""
        strategy = self.make_strategy()
        generator = torch.Generator().manual_seed(seed)
        return strategy.apply(batch, generator, context or self.make_context())

    def _masked(self, training: bool) -> Iterator[tuple[tuple[int, int], MaskedBatch]]:
        """Yield each of ``sizes`` with a masked batch of that size."""
        context = self.make_context(training=training)
        for rows, positions in self.sizes:
            batch = self.make_batch(rows, positions)
            yield (rows, positions), self._apply(batch, context)

    def test_implements_the_masking_protocol(self) -> None:
        assert isinstance(self.make_strategy(), MaskingStrategy)

    @in_training_and_evaluation
    def test_results_have_the_shape_of_the_predictions(self, training: bool) -> None:
        for size, masked in self._masked(training):
            assert isinstance(masked, MaskedBatch)
            for tensor in (masked.inputs, masked.targets, masked.loss_mask):
                assert tuple(tensor.shape) == size
            assert masked.inputs.dtype == torch.int64
            assert masked.targets.dtype == torch.int64
            assert masked.loss_mask.dtype == torch.bool

    @in_training_and_evaluation
    def test_inputs_and_counted_targets_are_token_ids(self, training: bool) -> None:
        for _, masked in self._masked(training):
            counted = masked.targets[masked.loss_mask]
            for ids in (masked.inputs, counted):
                assert (ids >= 0).all()
                assert (ids < self.vocabulary_size).all()

    def test_reserved_ids_are_token_ids(self) -> None:
        reserved = self._reserved_ids()
        for token in reserved:
            assert isinstance(token, int)
            assert 0 <= token < self.vocabulary_size
        assert len(set(reserved)) < self.vocabulary_size, "no id is left for the data"

    def test_the_same_arguments_give_the_same_result(self) -> None:
        batch = self.make_batch(6, 16)
        for _ in range(3):
            first = self._apply(batch)
            second = self._apply(batch)
            _assert_equal(first, second)

    def test_calls_do_not_depend_on_earlier_calls(self) -> None:
        strategy = self.make_strategy()
        other = self.make_batch(4, 9, seed=8)
        later = self.make_context(step=99)
        strategy.apply(other, torch.Generator().manual_seed(1), later)

        batch = self.make_batch(6, 16)
        context = self.make_context()
        again = strategy.apply(batch, torch.Generator().manual_seed(3), context)
        _assert_equal(again, self._apply(batch, context))

    def test_batch_is_left_unchanged(self) -> None:
        batch = self.make_batch(6, 16)
        tokens = batch.data.clone()
        sample_ids = batch.sample_ids.clone()
        extras = {name: tensor.clone() for name, tensor in batch.extras.items()}
        self._apply(batch)
        assert torch.equal(batch.data, tokens)
        assert torch.equal(batch.sample_ids, sample_ids)
        for name, tensor in extras.items():
            assert torch.equal(batch.extras[name], tensor)

    def test_global_random_generators_are_not_used(self) -> None:
        batch = self.make_batch(6, 16)
        before = torch.random.get_rng_state()
        first = self._apply(batch)
        after = torch.random.get_rng_state()
        assert torch.equal(after, before), "torch's global generator was used"
        torch.manual_seed(987)
        np.random.seed(987)
        _assert_equal(first, self._apply(batch))

    @in_training_and_evaluation
    def test_sample_is_masked_alike_in_any_row(self, training: bool) -> None:
        """A resumed or re-sharded run batches the same samples differently."""
        batch = self.make_batch(6, 16)
        context = self.make_context(training=training)
        order = torch.tensor([4, 2, 0, 5, 1, 3])
        extras = {name: tensor[order] for name, tensor in batch.extras.items()}
        moved = Batch(
            data=batch.data[order],
            sample_ids=batch.sample_ids[order],
            extras=extras,
        )
        straight = self._apply(batch, context)
        expected = MaskedBatch(
            inputs=straight.inputs[order],
            targets=straight.targets[order],
            loss_mask=straight.loss_mask[order],
        )
        _assert_equal(expected, self._apply(moved, context))

    def test_some_position_counts_in_the_loss(self) -> None:
        counts = []
        for seed in range(4):
            batch = self.make_batch(8, 64, seed)
            masked = self._apply(batch, seed=seed)
            counts.append(int(masked.loss_mask.sum()))
        assert any(counts)


def _assert_equal(first: MaskedBatch, second: MaskedBatch) -> None:
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.targets, second.targets)
    assert torch.equal(first.loss_mask, second.loss_mask)
