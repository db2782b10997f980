"""Samples of the run's data as token ids: for calibration from the training text, and held out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arb_ternary.errors import DataError
from arb_ternary.protocols.data import Batch, BatchRequest, MaskContext, MaskedBatch
from arb_ternary_train.evaluate import block_size_of
from arb_ternary_train.seeding import derived_generator

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


def calibration_tokens(
    context: TrainingContext, *, tokens: int, block_size: int, seed: int
) -> Tensor:
    """Draw training samples of ``block_size`` tokens, at least ``tokens`` in total.

    They are int64 ``[N, S]``. The same ``seed`` gives the same samples. No sample is drawn twice.

    Raises:
        DataError: the training text is too short, or its samples are not sequences of ids.
    """
    data = context.data
    count = -(-tokens // block_size)
    available = data.samples_per_epoch(block_size)
    if available < count:
        raise DataError(
            f"data {data.name}: {available:,} training samples of {block_size} tokens are too few "
            f"for {tokens:,} tokens of calibration",
            f"Ask for at most {available * block_size:,} tokens, or use a longer text.",
        )
    batches = data.batches(BatchRequest(batch_size=1, block_size=block_size, seed=seed))
    try:
        samples = [next(batches).data for _ in range(count)]
    finally:
        batches.close()
    return _sequences(data.name, samples, block_size)


def held_out_tokens(context: TrainingContext, *, tokens: int, block_size: int) -> Tensor:
    """Return held-out samples of ``block_size`` predictions, about ``tokens`` together.

    They are spread evenly over the held-out text: int64 ``[N, S + 1]``.

    Raises:
        DataError: the held-out text is too short, or its samples are not sequences of ids.
    """
    batches = context.data.held_out(1, block_size, -(-tokens // block_size))
    return _sequences(context.data.name, [batch.data for batch in batches], block_size + 1)


def held_out_batches(
    context: TrainingContext, *, tokens: int, block_size: int
) -> list[MaskedBatch]:
    """Return held-out samples of about ``tokens`` predictions, one sample a batch, on the device.

    They are spread evenly over the held-out text, and masked as in evaluations.
    """
    block_size = block_size_of(context.data, block_size)
    samples = context.data.held_out(1, block_size, -(-tokens // block_size))
    return [batch.to(context.device) for batch in masked_batches(context, samples, step=0)]


def masked_batches(
    context: TrainingContext, batches: Iterable[Batch], *, step: int
) -> Iterator[MaskedBatch]:
    """Yield held-out samples as an evaluation of the run after ``step`` steps masks them."""
    mask_context = MaskContext(
        step=step, seed=context.seed, vocabulary_size=context.vocabulary_size, training=False
    )
    for index, batch in enumerate(batches):
        generator = derived_generator(context.seed, "evaluation", index)
        yield context.masking.apply(batch, generator, mask_context)


def _sequences(name: str, samples: list[Tensor], length: int) -> Tensor:
    for sample in samples:
        if sample.dim() != 2 or sample.dtype != torch.int64 or sample.shape[1] < length:
            raise DataError(
                f"data {name}: its samples are not sequences of token ids",
                "Use the data source `text` or `tokens`.",
            )
    return torch.cat([sample[:, :length] for sample in samples])
