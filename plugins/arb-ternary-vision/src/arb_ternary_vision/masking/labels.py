"""The masking strategy ``labels``: the input is an image, the target its class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from arb_ternary.errors import DataError
from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch
from arb_ternary_vision.data.source import LABELS
from arb_ternary_vision.masking.config import Augmentation, LabelsConfig


class LabelMasking:
    """``inputs = images``, ``targets = labels``; every sample counts in the loss.

    In training the images are augmented as the options say. In evaluation they are those of the
    data source. Accuracy is reported besides the cross entropy.
    """

    def __init__(self, config: LabelsConfig) -> None:
        self.config = config

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        """Return images float32 ``[B, C, H, W]``, labels int64 ``[B]`` and an all-true mask.

        Raises:
            DataError: the batch has no labels.
        """
        if LABELS not in batch.extras:
            raise DataError(
                f"masking labels: batches of this data have no {LABELS}",
                "Use data with classes: digits, images or image_arrays.",
            )
        targets = batch.extras[LABELS].clone()
        inputs = augmented_images(batch, self.config.augment, generator, context)
        return MaskedBatch(inputs, targets, torch.ones_like(targets, dtype=torch.bool))

    def scores(self, output: Tensor, batch: MaskedBatch) -> Mapping[str, Tensor]:
        """Return ``accuracy``: 1 if the most likely class of ``output [B, V]`` is right, else 0."""
        return {"accuracy": (output.argmax(dim=-1) == batch.targets).float()}


def augmented_images(
    batch: Batch, changes: Sequence[Augmentation], generator: torch.Generator, context: MaskContext
) -> Tensor:
    """Return the images of ``batch``, changed in training, as they are in evaluation.

    In training with ``changes`` one number is drawn from ``generator``. Everything else is a hash
    of it and of the sample ids.
    """
    if not (context.training and changes):
        return batch.data.clone()
    # Imported here, because a run without augmentation should not take the second that kornia
    # takes.
    from arb_ternary_vision.masking.augment import augment

    salt = int(torch.randint(1 << 62, (), generator=generator))
    return augment(batch.data, changes, batch.sample_ids, salt)


def build(config: LabelsConfig) -> LabelMasking:
    """Build the strategy ``labels``."""
    return LabelMasking(config)
