"""Causal masking: every position predicts the token that follows it."""

from __future__ import annotations

import torch

from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch


class CausalMasking:
    """Next-token prediction: ``inputs = tokens[:, :-1]``, ``targets = tokens[:, 1:]``, every
    position counts.
    """

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        """Inputs and targets of ``batch``, int64 ``[B, S]``, and an all-true mask. Draws nothing
        from ``generator``.

        The two are copies: as views of one tensor, a caller that corrupts the inputs would corrupt
        the targets too.
        """
        inputs_BS = batch.data[:, :-1].clone(memory_format=torch.contiguous_format)
        targets_BS = batch.data[:, 1:].clone(memory_format=torch.contiguous_format)
        return MaskedBatch(inputs_BS, targets_BS, torch.ones_like(inputs_BS, dtype=torch.bool))


def build_causal(config: None = None) -> CausalMasking:
    """The causal strategy; it has no options."""
    return CausalMasking()
