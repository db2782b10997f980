"""What models have in common that take noise away from pictures of a class.

Shapes: ``B`` images, ``C`` channels, ``H`` and ``W`` pixels, ``D`` width, ``E`` time features
(even).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from arb_ternary.errors import DataError, UsageProblem
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.parts import make_embedding, make_linear, make_norm
from arb_ternary_vision.models.config import ImageModelConfig
from arb_ternary_vision.models.patch_embedding import check_images

#: Times in [0, 1] are a thousand units, as many as Ho et al. have steps.
_UNITS: Final = 1000.0
_LONGEST: Final = 10000.0


def time_features(time_B: Tensor, features: int) -> Tensor:
    """Float32 ``[B, E]`` of unit mean square: sines of ``1000 t f_i``, then cosines, times
    ``sqrt(2)``.

    ``f_i = 10000**(-2 i / E)`` (Vaswani et al., 2017). Computed in float64 and held nowhere.
    """
    exponent_H = torch.arange(features // 2, dtype=torch.float64, device=time_B.device) * (
        -2.0 / features
    )
    angle_BH = (time_B.double() * _UNITS)[:, None] * _LONGEST**exponent_H
    return torch.cat((angle_BH.sin(), angle_BH.cos()), dim=1).mul_(math.sqrt(2)).float()


class Conditioning(nn.Module):
    """One vector an image, of its time and its class; one more class than there are stands for
    "any".

    Args:
        config: makes the parts ternary or float.
        classes: how many there are.
    """

    def __init__(self, config: DecoderConfig, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.width = config.width
        self.labels = make_embedding(config, classes + 1)
        self.first = make_linear(config, config.width, config.width)
        self.norm = make_norm(config, config.width, gain=True)
        self.second = make_linear(config, config.width, config.width)
        self.output_norm = make_norm(config, config.width, gain=True)

    def forward(self, time_B: Tensor, labels_B: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The vector, ``[B, D]``.

        Args:
            time_B: in [0, 1].
            labels_B: int64, ``0 .. classes``, of which the last is "any"; None = any, of all.
            dtype: of the result.

        Raises:
            DataError: a label is none of them.
        """
        if labels_B is None:
            labels_B = torch.full(
                time_B.shape, self.classes, dtype=torch.int64, device=time_B.device
            )
        elif (
            labels_B.numel() and not 0 <= int(labels_B.min()) <= int(labels_B.max()) <= self.classes
        ):
            raise DataError(
                f"labels: from {int(labels_B.min())} to {int(labels_B.max())}, and the model was "
                f"made for {self.classes} classes, which are counted from 0"
            )
        features_BD = time_features(time_B, self.width).to(dtype)
        hidden_BD = F.silu(self.first(features_BD))
        joined_BD: Tensor = self.second(self.norm(hidden_BD)) + self.labels(labels_B).to(dtype)
        normed_BD: Tensor = self.output_norm(joined_BD)
        return normed_BD


class DenoisingModel(nn.Module):
    """``forward`` is ``denoise(images, condition)``, times the constant ``2**logit_scale``.

    A subclass makes its modules after these and overrides :meth:`denoise`.

    Args:
        options: of the model.
        classes: that pictures are of; ``labels`` may also be ``classes``, which is any.

    Attributes:
        takes_time: see ``arb_ternary_train.capabilities.takes_time``.

    Raises:
        UsageProblem: ``classes`` is less than 1.
    """

    takes_time = True

    def __init__(self, options: ImageModelConfig, classes: int) -> None:
        super().__init__()
        if classes < 1:
            raise UsageProblem(f"classes: must be at least 1, not {classes}")
        self.options = options
        self.classes = classes
        self.conditioning = Conditioning(options.parts, classes)
        self._scale = 2.0**options.logit_scale
        self._dtype: torch.dtype | None = None
        self._checkpoint_from: int | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(C, H, W)`` of its pictures."""
        return (self.options.channels, *self.options.sides)

    def forward(self, images_BCHW: Tensor, time: Tensor, labels: Tensor | None = None) -> Tensor:
        """What the noisy ``images`` ``[B, C, H, W]`` are predicted to hold, of their shape.

        Args:
            images_BCHW: float.
            time: in [0, 1], ``[B]``.
            labels: classes, int64 ``[B]``; None = any.

        Raises:
            UsageProblem: images of another shape than the model was made for.
            DataError: a label is no class.
        """
        check_images(self.options, images_BCHW)
        dtype = self._dtype or images_BCHW.dtype
        predicted_BCHW = self.denoise(images_BCHW.to(dtype), self.conditioning(time, labels, dtype))
        return predicted_BCHW if self._scale == 1.0 else predicted_BCHW * self._scale

    @abstractmethod
    def denoise(self, images_BCHW: Tensor, condition_BD: Tensor) -> Tensor:
        """What the head says, ``[B, C, H, W]``."""

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Compute in ``dtype``: float parameters, and the activations between ternary modules."""
        self.to(dtype)
        self._dtype = dtype

    def set_activation_checkpointing(self, enabled: bool, threshold: int | None = None) -> None:
        """Keep only each block's input in training and recompute the rest in the backward.

        Args:
            enabled: False keeps every activation.
            threshold: fewest images in a batch for which it is done; None = always.

        Raises:
            UsageProblem: the threshold is negative.
        """
        if threshold is not None and threshold < 0:
            raise UsageProblem(
                f"activation checkpointing: the threshold must be at least 0, not {threshold}"
            )
        self._checkpoint_from = (threshold or 0) if enabled else None

    def run_block(self, block: Callable[..., Tensor], x: Tensor, *arguments: object) -> Tensor:
        """``block(x, *arguments)``, recomputed in the backward where that was asked for."""
        enough = self._checkpoint_from is not None and len(x) >= self._checkpoint_from
        if not (enough and self.training and torch.is_grad_enabled()):
            return block(x, *arguments)
        # No randomness inside a block: votes are cast in the backward alone.
        again: Tensor = checkpoint(
            block, x, *arguments, use_reentrant=False, preserve_rng_state=False
        )
        return again


@torch.no_grad()
def zero_(linear: nn.Module) -> None:
    """Make the weight of a ternary or float linear zero; it still gets a gradient, from which it
    leaves zero.
    """
    if isinstance(linear, TernaryModule):
        linear.set_trits(torch.zeros_like(linear.trits()))
    elif isinstance(linear, nn.Linear):
        nn.init.zeros_(linear.weight)
