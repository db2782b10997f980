"""Make the parts of convolutional models, ternary or float as ``float_parts`` says.

Linears, embeddings and norms are those of :mod:`arb_ternary_text.models.parts`.

Shapes: ``B`` images, ``C`` input channels, ``N`` output channels, ``H`` and ``W`` rows and columns
of pixels, ``L`` windows of an image, ``K`` elements of a patch.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from arb_ternary_text.models.config import DecoderConfig, FloatPart
from arb_ternary_text.models.parts import FloatLinear, make_norm
from arb_ternary_vision.convolution import TernaryConv2d
from arb_ternary_vision.patches import Window, output_size, unfold_patches
from arb_ternary_vision.sizes import pair


class FloatConv2d(FloatLinear):
    """The float counterpart of ``TernaryConv2d``: a linear without bias over patches.

    Its weight is ``[N, C kh kw]``. With ``activations="int8"`` each patch is rounded to int8 by its
    largest element.

    Args:
        in_channels: ``C``.
        out_channels: ``N``.
        window: kernel size, stride, zero padding and dilation.
        activations: see :class:`~arb_ternary_text.models.parts.FloatLinear`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        window: Window,
        *,
        activations: Literal["int8", "float"] = "float",
    ) -> None:
        height, width = window.kernel_size
        super().__init__(in_channels * height * width, out_channels, activations=activations)
        self.window = window

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # nn.Linear's own name
        """Convolve ``[B, C, H, W]`` to ``[B, N, H', W']``."""
        window = self.window.integers
        y_BLN = super().forward(unfold_patches(input, window))
        height, width = output_size(input.shape[2:], window)
        return y_BLN.transpose(1, 2).reshape(len(input), self.out_features, height, width)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, window={self.window}"


def make_conv(
    config: DecoderConfig,
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    *,
    stride: int = 1,
    padding: int = 0,
    part: FloatPart = "linears",
) -> FloatConv2d | TernaryConv2d:
    """Make a square convolution without bias, ``[B, C, H, W] -> [B, N, H', W']``.

    Args:
        config: the options of the model.
        in_channels: ``C``.
        out_channels: ``N``.
        kernel_size: height and width of the kernel.
        stride: distance between patches.
        padding: rows and columns of zeros around the input.
        part: the entry of ``float_parts`` that makes this convolution float.
    """
    if part in config.float_parts:
        window = Window(pair(kernel_size), pair(stride), pair(padding))
        return FloatConv2d(in_channels, out_channels, window, activations=config.activations)
    return TernaryConv2d(
        in_channels,
        out_channels,
        kernel_size,
        stride=stride,
        padding=padding,
        group_size=config.exponent_groups,
        activations=config.activations,
        gradients=config.gradients,
        scale_rule=config.scale_rule,
        vote_bits=config.vote_bits,
    )


class ChannelNorm(nn.Module):
    """Normalises each pixel over its channels, ``[B, C, H, W]``.

    Args:
        norm: a norm over the last dimension, of ``C`` features.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return ``x`` normalised, in its dtype."""
        normed_BHWC: Tensor = self.norm(x_BCHW.movedim(1, -1))
        return normed_BHWC.movedim(-1, 1)


def make_channel_norm(config: DecoderConfig, channels: int) -> ChannelNorm:
    """Make a norm over channels, with a gain if the config asks for gains."""
    return ChannelNorm(make_norm(config, channels, gain=True))


def make_channel_sub_norm(config: DecoderConfig, channels: int) -> ChannelNorm | nn.Identity:
    """Make the norm in front of the last convolution of a block; Identity without sub-norms."""
    if not config.has_sub_norms:
        return nn.Identity()
    return ChannelNorm(make_norm(config, channels, gain=False))
