"""The masking strategy ``noise``: a picture, made noisy, is to be told from its noise (Ho et al.,
DDPM, 2020).
"""

from __future__ import annotations

import torch
from torch import Tensor

from arb_ternary.errors import DataError
from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch
from arb_ternary_diffusion.noise import Parts, level, noisy, target_of
from arb_ternary_diffusion.noise_config import NoiseConfig


class NoiseMasking:
    """``inputs = x_t``, ``targets`` what is predicted, float32 ``[B, ...]``; a prediction is a
    whole sample.

    Times of a training batch lie evenly from a random start and in random order (Kingma et al.,
    Variational Diffusion Models, 2021), which varies less from batch to batch than times drawn one
    by one. In evaluation they lie evenly at fixed places, in random order, and every sample has its
    class.

    Args:
        config: the options.
    """

    loss_unit = "squared error per pixel"

    def __init__(self, config: NoiseConfig) -> None:
        self.config = config

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        """See :class:`~arb_ternary.protocols.data.MaskingStrategy`.

        Raises:
            DataError: samples are no pictures.
        """
        if not batch.data.is_floating_point() or batch.data.dim() < 3:
            raise DataError(
                f"masking 'noise': samples are {str(batch.data.dtype).removeprefix('torch.')} "
                f"{list(batch.data.shape)}, not pictures [B, C, H, W] of floats",
                "Take data of images, such as `data: digits`; ids of text are for `masking: "
                "absorbing`.",
            )
        count = len(batch.data)
        config = self.config
        start_1 = (
            torch.rand(1, generator=generator)
            if context.training
            else torch.full((1,), 0.5 / count)
        )
        order_B = torch.randperm(count, generator=generator)
        time_B = ((start_1 + order_B / count) % 1.0).to(torch.float32)
        parts = Parts(batch.data, torch.randn(batch.data.shape, generator=generator))
        at = level(config.schedule, time_B, batch.data)
        labels_B = batch.extras.get("labels")
        if labels_B is not None and context.training and config.label_dropout:
            dropped_B = torch.rand(count, generator=generator) < config.label_dropout
            labels_B = labels_B.masked_fill(dropped_B, context.vocabulary_size)
        return MaskedBatch(
            noisy(parts, at),
            target_of(config.prediction, parts, at),
            torch.ones(count, dtype=torch.bool),
            time_B,
            {} if labels_B is None else {"labels": labels_B},
        )

    def losses(self, output: Tensor, batch: MaskedBatch) -> Tensor:
        """Mean squared error of each sample, float32 ``[B]``."""
        return (output.float() - batch.targets).square().flatten(1).mean(dim=1)


def build(config: NoiseConfig) -> NoiseMasking:
    """The factory that the strategy ``noise`` registers."""
    return NoiseMasking(config)
