"""The masking strategy ``noise``: predict the noise in an image (Ho et al., DDPM, 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from arb_ternary.errors import DataError
from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch
from arb_ternary_diffusion.noise import Parts, add_noise, level, prediction_target
from arb_ternary_diffusion.noise_config import NoiseConfig


class NoiseMasking:
    """Inputs are noisy images ``x_t``, targets what the model predicts; both float32 ``[B, ...]``.

    One prediction is a whole image. The times of a training batch are evenly spaced from a random
    start and in random order (Kingma et al., Variational Diffusion Models, 2021), which varies less
    between batches than independent times. In evaluation they are evenly spaced at fixed places, in
    random order, and every image has its class.

    Args:
        config: the options.
    """

    loss_unit = "squared error per pixel"

    def __init__(self, config: NoiseConfig) -> None:
        self.config = config

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        """Return noisy images, targets, an all-true mask, times and, if there are any, classes.

        Raises:
            DataError: the samples are not images.
        """
        if not batch.data.is_floating_point() or batch.data.dim() < 3:
            dtype = str(batch.data.dtype).removeprefix("torch.")
            raise DataError(
                f"masking 'noise': samples are {dtype} {list(batch.data.shape)}, not images "
                "[B, C, H, W] of floats",
                "Use data of images, such as `data: digits`; ids of text are for `masking: "
                "absorbing`.",
            )
        config = self.config
        count = len(batch.data)
        if context.training:
            start_1 = torch.rand(1, generator=generator)
        else:
            start_1 = torch.full((1,), 0.5 / count)
        order_B = torch.randperm(count, generator=generator)
        time_B = ((start_1 + order_B / count) % 1.0).to(torch.float32)
        parts = Parts(batch.data, torch.randn(batch.data.shape, generator=generator))
        at = level(config.schedule, time_B, batch.data)
        labels_B = batch.extras.get("labels")
        if labels_B is not None and context.training and config.label_dropout:
            dropped_B = torch.rand(count, generator=generator) < config.label_dropout
            # The id after the last class stands for any class.
            labels_B = labels_B.masked_fill(dropped_B, context.vocabulary_size)
        return MaskedBatch(
            add_noise(parts, at),
            prediction_target(config.prediction, parts, at),
            torch.ones(count, dtype=torch.bool),
            time_B,
            {} if labels_B is None else {"labels": labels_B},
        )

    def losses(self, output: Tensor, batch: MaskedBatch) -> Tensor:
        """Return the mean squared error of each image, float32 ``[B]``."""
        return (output.float() - batch.targets).square().flatten(1).mean(dim=1)


def build(config: NoiseConfig) -> NoiseMasking:
    """Build the strategy ``noise``."""
    return NoiseMasking(config)
