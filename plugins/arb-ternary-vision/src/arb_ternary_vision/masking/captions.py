"""The masking strategy ``captions``: predict the next character of the text about an image."""

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
    """Inputs are characters and targets the next ones; the model gets ``images`` as an argument.

    What fills up a text after its end does not count in the loss. Images are augmented as with the
    strategy ``labels``.
    """

    def __init__(self, config: LabelsConfig) -> None:
        self.config = config

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        """Return ids int64 ``[B, S]`` twice, which of them count, and the images.

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
        # A text begins with the id that ends it, so it lasts until that id comes a second time.
        ends_BS = inputs_BS == ids_BT[:, :1]
        counts_BS = ends_BS.cumsum(dim=1) == 1
        images = augmented_images(batch, self.config.augment, generator, context)
        return MaskedBatch(inputs_BS, targets_BS, counts_BS, arguments={"images": images})

    def scores(self, output: Tensor, batch: MaskedBatch) -> Mapping[str, Tensor]:
        """Return ``accuracy`` of each character, given those before: 1 if it is right, else 0."""
        return {"accuracy": (output.argmax(dim=-1) == batch.targets).float().flatten()}


def build(config: LabelsConfig) -> CaptionMasking:
    """Build the strategy ``captions``."""
    return CaptionMasking(config)
