"""Causal masking: a position predicts the token that follows it, everywhere or in answers."""

from __future__ import annotations

import torch
from attrs import evolve

from arb_ternary.errors import DataError
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


class AnswerMasking(CausalMasking):
    """Next-token prediction of the tokens that the data source marks as learned.

    A data source marks them by the extra ``learned``, bool ``[B, S + 1]``.
    """

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        """Return inputs and targets, int64 ``[B, S]``, and which targets are learned.

        Raises:
            DataError: the data does not say what is learned.
        """
        if "learned" not in batch.extras:
            raise DataError(
                "masking answers: this data does not say which tokens are answers",
                "Set data.name: chat, which reads conversations, or masking: causal.",
            )
        learned_BS = batch.extras["learned"][:, 1:].clone(memory_format=torch.contiguous_format)
        return evolve(super().apply(batch, generator, context), loss_mask=learned_BS)


def build_answers(config: None = None) -> AnswerMasking:
    """Build the masking strategy ``answers``, which has no options."""
    return AnswerMasking()
