"""Causal masking: every position predicts the token that follows it."""

from __future__ import annotations

import torch

from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch


class CausalMasking:
    """Next-token prediction: ``inputs = tokens[:, :-1]``, ``targets = tokens[:, 1:]``."""

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        """Return inputs and targets, int64 ``[B, S]``, and a mask of all positions.

        Nothing is drawn from ``generator``. Inputs and targets are copies: with views of one
        tensor, a caller that corrupts the inputs would corrupt the targets too.
        """
        inputs_BS = batch.data[:, :-1].clone(memory_format=torch.contiguous_format)
        targets_BS = batch.data[:, 1:].clone(memory_format=torch.contiguous_format)
        return MaskedBatch(inputs_BS, targets_BS, torch.ones_like(inputs_BS, dtype=torch.bool))


def build_causal(config: None = None) -> CausalMasking:
    """Build the masking strategy ``causal``, which has no options."""
    return CausalMasking()
