"""The suite of a masking strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from attrs import evolve

from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch, MaskingStrategy
from arb_ternary_testing.component import ComponentCase
from arb_ternary_train.capabilities import reserved_ids


class MaskingSuite(ComponentCase):
    """Everything that a :class:`~arb_ternary.protocols.data.MaskingStrategy` has to do.

    Subclass it and set ``component`` to the registered name (or override :meth:`make_strategy`);
    ``options`` are the component's options as in a config.

    Attributes:
        vocabulary_size: token ids of the batches that the suite makes.
        sizes: ``(B, S)`` of those batches.
    """

    kind: ClassVar[str] = "masking"
    vocabulary_size: ClassVar[int] = 37
    sizes: ClassVar[tuple[tuple[int, int], ...]] = ((1, 1), (1, 7), (6, 16), (5, 33))

    def make_strategy(self) -> MaskingStrategy:
        """The strategy under test; a fresh one a call."""
        strategy: MaskingStrategy = self.build()
        return strategy

    def make_batch(self, rows: int, positions: int, seed: int = 0) -> Batch:
        """A batch of random tokens, none of them reserved; override it where the strategy needs
        ``extras``.
        """
        rng = np.random.default_rng(seed)
        reserved = set(self._reserved_ids())
        used = np.array(
            [token for token in range(self.vocabulary_size) if token not in reserved],
            dtype=np.int64,
        )
        tokens = torch.from_numpy(used[rng.integers(0, len(used), (rows, positions + 1))])
        return Batch(
            data=tokens,
            sample_ids=torch.from_numpy(rng.permutation(10 * rows)[:rows].astype(np.int64)),
        )

    def make_context(self, **changes: Any) -> MaskContext:
        """A context in the middle of a run."""
        return evolve(MaskContext(step=12, seed=5, vocabulary_size=self.vocabulary_size), **changes)

    def _reserved_ids(self) -> Sequence[int]:
        return reserved_ids(self.make_strategy(), self.vocabulary_size)

    def _apply(
        self, batch: Batch, context: MaskContext | None = None, seed: int = 3
    ) -> MaskedBatch:
        generator = torch.Generator().manual_seed(seed)
        return self.make_strategy().apply(batch, generator, context or self.make_context())

    def test_it_keeps_the_protocol_of_a_masking_strategy(self) -> None:
        assert isinstance(self.make_strategy(), MaskingStrategy)

    @pytest.mark.parametrize("training", [True, False])
    def test_inputs_targets_and_mask_have_the_shape_of_the_predictions(
        self, training: bool
    ) -> None:
        for rows, positions in self.sizes:
            masked = self._apply(
                self.make_batch(rows, positions), self.make_context(training=training)
            )
            assert isinstance(masked, MaskedBatch)
            for tensor, dtype in (
                (masked.inputs, torch.int64),
                (masked.targets, torch.int64),
                (masked.loss_mask, torch.bool),
            ):
                assert tensor.dtype == dtype
                assert tuple(tensor.shape) == (rows, positions)

    @pytest.mark.parametrize("training", [True, False])
    def test_inputs_and_the_targets_that_count_are_token_ids(self, training: bool) -> None:
        for rows, positions in self.sizes:
            masked = self._apply(
                self.make_batch(rows, positions), self.make_context(training=training)
            )
            for ids in (masked.inputs.flatten(), masked.targets[masked.loss_mask]):
                assert bool(((ids >= 0) & (ids < self.vocabulary_size)).all())

    def test_reserved_ids_are_token_ids(self) -> None:
        reserved = self._reserved_ids()
        assert all(
            isinstance(token, int) and 0 <= token < self.vocabulary_size for token in reserved
        )
        assert len(set(reserved)) < self.vocabulary_size, "no id is left for the data"

    def test_the_same_arguments_give_the_same_result(self) -> None:
        batch = self.make_batch(6, 16)
        for _ in range(3):
            _assert_equal(self._apply(batch), self._apply(batch))

    def test_a_strategy_keeps_nothing_from_one_call_for_the_next(self) -> None:
        strategy = self.make_strategy()
        batch = self.make_batch(6, 16)
        context = self.make_context()
        strategy.apply(
            self.make_batch(4, 9, seed=8),
            torch.Generator().manual_seed(1),
            self.make_context(step=99),
        )
        again = strategy.apply(batch, torch.Generator().manual_seed(3), context)
        _assert_equal(again, self._apply(batch, context))

    def test_the_batch_is_left_alone(self) -> None:
        batch = self.make_batch(6, 16)
        tokens = batch.data.clone()
        sample_ids = batch.sample_ids.clone()
        extras = {name: tensor.clone() for name, tensor in batch.extras.items()}
        self._apply(batch)
        assert torch.equal(batch.data, tokens)
        assert torch.equal(batch.sample_ids, sample_ids)
        assert all(torch.equal(batch.extras[name], tensor) for name, tensor in extras.items())

    def test_no_randomness_comes_from_the_global_generators(self) -> None:
        batch = self.make_batch(6, 16)
        before = torch.random.get_rng_state()
        first = self._apply(batch)
        assert torch.equal(torch.random.get_rng_state(), before), (
            "torch's global generator was used"
        )
        torch.manual_seed(987)
        np.random.seed(987)
        _assert_equal(first, self._apply(batch))

    @pytest.mark.parametrize("training", [True, False])
    def test_a_sample_is_masked_alike_in_whichever_row_it_stands(self, training: bool) -> None:
        """Otherwise a resumed or re-sharded run, which batches the same samples differently, would
        be another run.
        """
        batch = self.make_batch(6, 16)
        context = self.make_context(training=training)
        order = torch.tensor([4, 2, 0, 5, 1, 3])
        moved = Batch(
            data=batch.data[order],
            sample_ids=batch.sample_ids[order],
            extras={name: tensor[order] for name, tensor in batch.extras.items()},
        )
        straight = self._apply(batch, context)
        turned = self._apply(moved, context)
        _assert_equal(
            MaskedBatch(straight.inputs[order], straight.targets[order], straight.loss_mask[order]),
            turned,
        )

    def test_something_counts_in_the_loss(self) -> None:
        counted = [
            bool(self._apply(self.make_batch(8, 64, seed), seed=seed).loss_mask.any())
            for seed in range(4)
        ]
        assert any(counted)


def _assert_equal(first: MaskedBatch, second: MaskedBatch) -> None:
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.targets, second.targets)
    assert torch.equal(first.loss_mask, second.loss_mask)
