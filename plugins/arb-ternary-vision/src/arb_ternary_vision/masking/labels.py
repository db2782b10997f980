"""The masking strategy ``labels``: an image in, its class out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from arb_ternary.errors import DataError
from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch
from arb_ternary_vision.data.source import LABELS
from arb_ternary_vision.masking.config import Augmentation, LabelsConfig


class LabelMasking:
    """``inputs = images``, ``targets = labels``, every one counts; cross entropy, and accuracy
    beside it.

    In training the images are augmented as the options say, in evaluation they are what the data
    source gives.
    """

    def __init__(self, config: LabelsConfig) -> None:
        self.config = config

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        """Images float32 ``[B, C, H, W]``, labels int64 ``[B]`` and an all-true mask.

        One number is drawn from ``generator``, in training with augmentation; all else is a hash of
        it and of the sample ids.

        Raises:
            DataError: the batch has no labels.
        """
        if LABELS not in batch.extras:
            raise DataError(
                f"masking labels: batches of this data have no {LABELS}",
                "Use data of classes: digits, images or image_arrays.",
            )
        targets = batch.extras[LABELS].clone()
        inputs = augmented_images(batch, self.config.augment, generator, context)
        return MaskedBatch(inputs, targets, torch.ones_like(targets, dtype=torch.bool))

    def scores(self, output: Tensor, batch: MaskedBatch) -> Mapping[str, Tensor]:
        """``accuracy``: 1 where the likeliest class of ``output [B, V]`` is the image's, 0
        elsewhere.
        """
        return {"accuracy": (output.argmax(dim=-1) == batch.targets).float()}


def augmented_images(
    batch: Batch, changes: Sequence[Augmentation], generator: torch.Generator, context: MaskContext
) -> Tensor:
    """The images of ``batch``, in training changed; a copy of them in evaluation.

    One number is drawn from ``generator``, in training and where there are changes; all else is a
    hash of it and of the sample ids.
    """
    if not (context.training and changes):
        return batch.data.clone()
    # Imported here, because kornia takes a second that a run without augmentation should not.
    from arb_ternary_vision.masking.augment import augmented

    salt = int(torch.randint(1 << 62, (), generator=generator))
    return augmented(batch.data, changes, batch.sample_ids, salt)


def build(config: LabelsConfig) -> LabelMasking:
    """The strategy of ``config``."""
    return LabelMasking(config)
