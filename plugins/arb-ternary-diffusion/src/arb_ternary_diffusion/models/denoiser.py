"""The base of models that remove noise from images of a class.

Shapes: ``B`` images, ``C`` channels, ``H`` and ``W`` rows and columns of pixels, ``D`` width, ``E``
time features (even).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arb_ternary.errors import DataError, UsageProblem
from arb_ternary_text.models.block_model import BlockModel
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.parts import make_embedding, make_linear, make_norm
from arb_ternary_vision.models.config import ImageModelConfig
from arb_ternary_vision.models.patch_embedding import check_images

#: Times in [0, 1] are 1000 units, the number of steps of Ho et al.
_UNITS: Final = 1000.0
#: Longest wavelength of a time feature over 2 pi, in units.
_LONGEST: Final = 10000.0


def time_features(time_B: Tensor, features: int) -> Tensor:
    """Return float32 ``[B, E]`` of unit mean square: ``sqrt(2)`` times sines, then cosines.

    Their arguments are ``1000 t f_i`` with ``f_i = 10000**(-2 i / E)`` (Vaswani et al., 2017). They
    are computed in float64 and are not stored in the model.
    """
    index_H = torch.arange(features // 2, dtype=torch.float64, device=time_B.device)
    exponent_H = index_H * (-2.0 / features)
    angle_BH = (time_B.double() * _UNITS)[:, None] * _LONGEST**exponent_H
    return torch.cat((angle_BH.sin(), angle_BH.cos()), dim=1).mul_(math.sqrt(2)).float()


class Conditioning(nn.Module):
    """Maps the time and the class of each image to one vector.

    One class more than the data has stands for "any class".

    Args:
        config: the options of its parts.
        classes: number of classes of the data.
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
        """Return the vectors, ``[B, D]``.

        Args:
            time_B: in [0, 1].
            labels_B: int64 from 0 to ``classes``, which stands for any class; None = any class for
                all images.
            dtype: dtype of the result.

        Raises:
            DataError: a label is not a class.
        """
        if labels_B is None:
            labels_B = torch.full(
                time_B.shape, self.classes, dtype=torch.int64, device=time_B.device
            )
        elif labels_B.numel():
            lowest = int(labels_B.min())
            highest = int(labels_B.max())
            if lowest < 0 or highest > self.classes:
                raise DataError(
                    f"labels: from {lowest} to {highest}, and the model was made for "
                    f"{self.classes} classes, which are counted from 0"
                )
        features_BD = time_features(time_B, self.width).to(dtype)
        hidden_BD = F.silu(self.first(features_BD))
        sum_BD: Tensor = self.second(self.norm(hidden_BD)) + self.labels(labels_B).to(dtype)
        normed_BD: Tensor = self.output_norm(sum_BD)
        return normed_BD


class DenoisingModel(BlockModel):
    """``forward`` is ``denoise(images, condition)``, times the constant ``2**logit_scale``.

    A subclass makes its modules after those here and overrides :meth:`denoise`.

    Args:
        options: the options of the model.
        classes: number of classes of the data.

    Attributes:
        takes_time: see ``arb_ternary_train.capabilities.takes_time``.

    Raises:
        UsageProblem: ``classes`` is less than 1.
    """

    takes_time: ClassVar[bool] = True

    def __init__(self, options: ImageModelConfig, classes: int) -> None:
        super().__init__()
        if classes < 1:
            raise UsageProblem(f"classes: must be at least 1, not {classes}")
        self.options = options
        self.classes = classes
        self.conditioning = Conditioning(options.parts, classes)
        self._scale = 2.0**options.logit_scale

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(C, H, W)`` of its images."""
        return (self.options.channels, *self.options.sides)

    def forward(self, images_BCHW: Tensor, time: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the prediction for noisy images, of their shape.

        Args:
            images_BCHW: float ``[B, C, H, W]``.
            time: in [0, 1], ``[B]``.
            labels: classes, int64 ``[B]``; the number of classes stands for any class, as does None
                for all images.

        Raises:
            UsageProblem: the model was made for images of another shape.
            DataError: a label is not a class.
        """
        check_images(self.options, images_BCHW)
        dtype = self._dtype or images_BCHW.dtype
        condition_BD = self.conditioning(time, labels, dtype)
        predicted_BCHW = self.denoise(images_BCHW.to(dtype), condition_BD)
        return predicted_BCHW if self._scale == 1.0 else predicted_BCHW * self._scale

    @abstractmethod
    def denoise(self, images_BCHW: Tensor, condition_BD: Tensor) -> Tensor:
        """Return the output of the head, ``[B, C, H, W]``."""
