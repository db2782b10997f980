"""What the strategies that hide tokens share: the options of the replacement, and masking itself.

Shapes: ``B`` samples, ``S`` positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import ConfigError, DataError
from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch
from arb_ternary_progressive.masking_config import ReplacementOptions
from arb_ternary_progressive.masks import corrupt, hidden_positions


@frozen
class GrowthContext(MaskContext):
    """Where in the growth of a model a batch is masked.

    Attributes:
        depth: how far the model has come: 0 with its first stack, 1 with its last; 1 for one that
            does not grow.
        time: diffusion time in [0, 1], where the phase has one.
    """

    depth: float = 1.0
    time: float | None = None


def growth_of(context: MaskContext) -> GrowthContext:
    """``context`` as one of growth: of a model that does not grow, where the phase says nothing of
    it.
    """
    if isinstance(context, GrowthContext):
        return context
    return GrowthContext(context.step, context.seed, context.vocabulary_size, context.training)


@frozen
class RowMasks:
    """What decides the masks of a batch, besides seed and sample ids.

    Attributes:
        shares: of hidden positions, one a row.
        keys: what enters the hash for time, one a row.
        times: the time of each row; None for a strategy without time.
    """

    shares: tuple[float, ...]
    keys: tuple[int, ...]
    times: tuple[float, ...] | None = None


class HidingStrategy(ABC):
    """Hides tokens of each sample; the model is asked what they were. Targets are the tokens of the
    same positions.

    Exactly ``floor(S share)`` positions a row are hidden and count in the loss. Masks do not depend
    on the step: a sample that comes again at the same time is hidden alike, so that a cache of what
    a model made of it stays true.
    """

    def __init__(self, replacement: ReplacementOptions) -> None:
        self.replacement = replacement

    @abstractmethod
    def rows(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> RowMasks:
        """How much of each row is hidden, and by which key."""

    def mask_token(self, vocabulary_size: int) -> int:
        """The id that stands for a hidden token.

        Raises:
            ConfigError: it is outside the vocabulary.
        """
        token = self.replacement.mask_token_id
        if token is None:
            return vocabulary_size - 1
        if token >= vocabulary_size:
            raise ConfigError(
                f"mask_token_id: {token} is outside the vocabulary of {vocabulary_size} ids",
                f"Take an id below {vocabulary_size} that the data does not use, or null for the "
                f"last one.",
            )
        return token

    def reserved_ids(self, vocabulary_size: int) -> tuple[int, ...]:
        """Ids that the data must not use."""
        return (self.mask_token(vocabulary_size),)

    def choose(
        self, batch: Batch, generator: torch.Generator, context: MaskContext
    ) -> tuple[Tensor, Tensor | None]:
        """The positions that :meth:`apply` hides, bool ``[B, S]``, and the times, float32 ``[B]``,
        where there are any.

        Where times are drawn, an equally seeded generator gives the same ones.
        """
        return _chosen(batch, self.rows(batch, generator, context), context)

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        """Corrupted inputs, the tokens as they were, and the hidden positions, all ``[B, S]``; and
        the times.

        Raises:
            DataError: the mask token occurs in the data.
            ConfigError: it is outside the vocabulary.
        """
        tokens_BS = batch.data[:, :-1].clone(memory_format=torch.contiguous_format)
        mask_token = self.mask_token(context.vocabulary_size)
        self._check_mask_token_unused(tokens_BS, batch.sample_ids, mask_token)
        rows = self.rows(batch, generator, context)
        hidden_BS, times_B = _chosen(batch, rows, context)
        inputs_BS = corrupt(
            tokens_BS,
            hidden_BS,
            batch.sample_ids.to(tokens_BS.device),
            rows.keys,
            context.seed,
            vocabulary_size=context.vocabulary_size,
            mask_token=mask_token,
            mask_share=self.replacement.mask_share,
            random_share=self.replacement.random_share,
        )
        return MaskedBatch(inputs_BS, tokens_BS, hidden_BS, times_B)

    @staticmethod
    def _check_mask_token_unused(tokens_BS: Tensor, sample_ids_B: Tensor, mask_token: int) -> None:
        found_BS = tokens_BS == mask_token
        if bool(found_BS.any()):
            row, position = (int(i) for i in found_BS.nonzero()[0])
            raise DataError(
                f"sample {int(sample_ids_B[row])}: token id {mask_token} at position {position} is "
                "the mask token, and the data uses it",
                "Give the data an id more: data: {name: with_mask_token, source: ...}; or set "
                "mask_token_id to an "
                "id that it does not use.",
            )


def _chosen(batch: Batch, rows: RowMasks, context: MaskContext) -> tuple[Tensor, Tensor | None]:
    device = batch.data.device
    positions = batch.data.shape[1] - 1
    hidden_BS = hidden_positions(
        batch.sample_ids.to(device), positions, rows.shares, rows.keys, context.seed
    )
    return hidden_BS, None if rows.times is None else torch.tensor(rows.times, device=device)
