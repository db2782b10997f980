"""The masking strategy ``captions``: an image and the beginning of its text in, the next character
out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from arb_ternary.errors import DataError
from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch
from arb_ternary_vision.data.captioned import CAPTIONS
from arb_ternary_vision.masking.config import LabelsConfig
from arb_ternary_vision.masking.labels import augmented_images


class CaptionMasking:
    """Characters are inputs and, one place on, targets; images are the model's argument ``images``.

    What fills up a text behind its end does not count. Images are augmented in training as with the
    masking ``labels``.
    """

    def __init__(self, config: LabelsConfig) -> None:
        self.config = config

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        """Ids int64 ``[B, S]`` twice, where they count, and ``images`` float32 ``[B, C, H, W]``.

        Raises:
            DataError: the batch has no texts.
        """
        if CAPTIONS not in batch.extras:
            raise DataError(
                f"masking captions: batches of this data have no {CAPTIONS}",
                "Use data: {name: captioned, images: ...}.",
            )
        ids_BT = batch.extras[CAPTIONS]
        inputs_BS = ids_BT[:, :-1].clone()
        targets_BS = ids_BT[:, 1:].clone()
        # A text begins with the id that ends it.
        ends_BS = inputs_BS == ids_BT[:, :1]
        counts_BS = ends_BS.cumsum(dim=1) == 1
        images = augmented_images(batch, self.config.augment, generator, context)
        return MaskedBatch(inputs_BS, targets_BS, counts_BS, arguments={"images": images})

    def scores(self, output: Tensor, batch: MaskedBatch) -> Mapping[str, Tensor]:
        """``accuracy`` of each character, given those before it: 1 where the likeliest is right, 0
        elsewhere.
        """
        return {"accuracy": (output.argmax(dim=-1) == batch.targets).float().flatten()}


def build(config: LabelsConfig) -> CaptionMasking:
    """The strategy of ``config``."""
    return CaptionMasking(config)
