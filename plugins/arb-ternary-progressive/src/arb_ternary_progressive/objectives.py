"""Training objectives: the targets of a batch, and the positions that count.

Shapes: ``B`` samples, ``S`` positions.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.errors import ConfigError, DataError
from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch, MaskingStrategy
from arb_ternary_progressive.masking import HidingStrategy
from arb_ternary_progressive.stackwise import Objective

#: A target that does not count, by the convention of torch's cross entropy.
IGNORED: Final = -100


class ObjectiveMasking:
    """Makes the targets of an objective at the positions that a strategy chooses.

    A ``loss_mask`` among the extras of a batch limits the positions that count.

    Args:
        strategy: chooses the positions, and hides them if the objective does; None = every
            position.
        objective: ``mlm``: the tokens themselves. ``clm``: ``targets[s] = tokens[s + 1]``; the last
            target repeats the last token and never counts. ``custom``: ``targets`` among the extras
            of the batch; where they are ``IGNORED``, nothing counts and the target becomes 0.
    """

    def __init__(self, strategy: MaskingStrategy | None, objective: Objective) -> None:
        self.strategy = strategy
        self.objective = objective

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        """See ``MaskingStrategy``, and :meth:`prepare`."""
        return self.prepare(batch, generator, context)[0]

    def prepare(
        self, batch: Batch, generator: torch.Generator, context: MaskContext
    ) -> tuple[MaskedBatch, Tensor]:
        """Return ``batch`` with the targets of the objective, and the positions that were chosen.

        Only ``mlm`` hides tokens in the inputs.

        Raises:
            DataError: ``custom`` without targets, or targets with an objective that makes its own.
            ConfigError: the objective is ``mlm``, and the strategy has other targets than the
                hidden tokens.
        """
        tokens_BS = batch.data[:, :-1]
        inputs_BS, masks_BS, times_B = self._chosen(batch, generator, context)
        counted_BS = masks_BS
        if "loss_mask" in batch.extras:
            counted_BS = masks_BS & batch.extras["loss_mask"]
        given_BS = batch.extras.get("targets")

        if self.objective == "custom":
            if given_BS is None:
                raise DataError(
                    "batch: has no 'targets', and the objective custom takes them from the batch",
                    "Give targets [B, S] with input_ids, or train with the objective mlm or clm.",
                )
            valid_BS = given_BS != IGNORED
            targets_BS = given_BS.masked_fill(~valid_BS, 0)
            return MaskedBatch(inputs_BS, targets_BS, counted_BS & valid_BS, times_B), masks_BS

        if given_BS is not None:
            raise DataError(
                f"batch: has 'targets', and the objective {self.objective} makes its own",
                "Set training_objective: custom, or leave targets out.",
            )
        if self.objective == "mlm":
            return MaskedBatch(inputs_BS, tokens_BS.clone(), counted_BS, times_B), masks_BS
        next_BS = torch.cat((tokens_BS[:, 1:], tokens_BS[:, -1:]), dim=1)
        counted_BS = counted_BS & clm_mask(masks_BS)
        return MaskedBatch(inputs_BS, next_BS, counted_BS, times_B), masks_BS

    def _chosen(
        self, batch: Batch, generator: torch.Generator, context: MaskContext
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return inputs (hidden if the objective does so), chosen positions and times."""
        tokens_BS = batch.data[:, :-1]
        strategy = self.strategy
        if strategy is None:
            return tokens_BS, torch.ones_like(tokens_BS, dtype=torch.bool), None
        if self.objective != "mlm" and isinstance(strategy, HidingStrategy):
            masks_BS, times_B = strategy.choose(batch, generator, context)
            return tokens_BS, masks_BS, times_B

        masked = strategy.apply(batch, generator, context)
        if self.objective != "mlm":
            return tokens_BS, masked.loss_mask, masked.times
        if not torch.equal(masked.targets[masked.loss_mask], tokens_BS[masked.loss_mask]):
            raise ConfigError(
                "training_objective: mlm asks for the hidden tokens, and "
                f"{type(strategy).__name__} for others",
                "Use mlm, progressive or time_step masking, or the objective clm.",
            )
        return masked.inputs, masked.loss_mask, masked.times


def clm_mask(masks_BS: Tensor) -> Tensor:
    """Return every position but the last, whose next token is not in the batch: bool ``[B, S]``."""
    mask_BS = torch.ones_like(masks_BS)
    mask_BS[:, -1] = False
    return mask_BS
