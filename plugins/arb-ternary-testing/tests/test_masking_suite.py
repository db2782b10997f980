"""Run the suite that every masking strategy must pass on causal masking."""

from __future__ import annotations

import torch

from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch, MaskingStrategy
from arb_ternary_testing import MaskingSuite
from arb_ternary_text.data.masking import CausalMasking


class TestCausal(MaskingSuite):
    component = "causal"


class Hiding(CausalMasking):
    """Replaces the first token by id 0, which the data must not use."""

    def reserved_ids(self, vocabulary_size: int) -> tuple[int, ...]:
        return (0,)

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        assert not bool((batch.data == 0).any()), "a reserved id is in the data"
        masked = super().apply(batch, generator, context)
        masked.inputs[:, 0] = 0
        return masked


class TestHiding(MaskingSuite):
    def make_strategy(self) -> MaskingStrategy:
        return Hiding()

    def test_all_other_ids_are_in_the_batches(self) -> None:
        assert self.make_batch(64, 64).data.unique().tolist() == list(
            range(1, self.vocabulary_size)
        )
