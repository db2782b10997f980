"""Convolutions with a ternary weight: linear layers over patches."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.module import GroupSize, VoteOptions
from arb_ternary_vision.convolution_ops import convolution
from arb_ternary_vision.patches import Window, output_size, unfold_rows
from arb_ternary_vision.sizes import Pair, pair


class ConvolutionOptions(VoteOptions, total=False):
    """Options that a convolution passes to :class:`TernaryLinear`."""

    bias: bool
    group_size: GroupSize
    activations: str
    exponent_offset: int
    device: torch.device | str | None


class TernaryConv2d(TernaryLinear):
    """A two-dimensional convolution whose weight is ``[N, C * kh * kw]``, applied to patches.

    Each patch is one row of activations with its own int8 scale. Padding is with zeros. Groups of
    channels are not supported.

    Args:
        in_channels: ``C``.
        out_channels: ``N``.
        kernel_size: height and width of the kernel.
        stride: distance between patches.
        padding: rows and columns of zeros around the input.
        dilation: distance between the elements of the kernel.
        options: see :class:`ConvolutionOptions`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        *,
        stride: int | Pair = 1,
        padding: int | Pair = 0,
        dilation: int | Pair = 1,
        **options: Unpack[ConvolutionOptions],
    ) -> None:
        height, width = pair(kernel_size)
        super().__init__(in_channels * height * width, out_channels, **options)
        self.out_channels = out_channels
        self.kernel_size = (height, width)
        self.stride = pair(stride)
        self.padding = pair(padding)
        self.dilation = pair(dilation)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve ``x [B, C, H, W]`` (float) to ``[B, N, H', W']``, channels last in memory."""
        window = Window(self.kernel_size, self.stride, self.padding, self.dilation).integers
        size = (x.shape[0], *output_size(x.shape[2:], window), self.out_channels)
        if self.activations == "float":
            return super().forward(unfold_rows(x, window)).view(size).permute(0, 3, 1, 2)
        anchor = self.vote_anchor()
        y_MN = convolution(
            self.in_autocast(x),
            anchor,
            self.integer_bias(),
            *self.vote_state(),
            window,
            self.gradients,
        )
        if anchor is not None:
            self.expect_votes(y_MN)
        y: Tensor = y_MN.view(size).permute(0, 3, 1, 2)
        return y


class TernaryConv1d(TernaryConv2d):
    """A one-dimensional convolution, ``[B, C, L]`` to ``[B, N, L']``.

    The arguments are those of :class:`TernaryConv2d`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        **options: Unpack[ConvolutionOptions],
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            (1, kernel_size),
            stride=(1, stride),
            padding=(0, padding),
            dilation=(1, dilation),
            **options,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Convolve ``x [B, C, L]`` (float) to ``[B, N, L']``."""
        return super().forward(x.unsqueeze(2)).squeeze(2)
