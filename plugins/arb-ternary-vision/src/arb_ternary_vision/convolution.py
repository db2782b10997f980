"""Convolutions with a ternary weight: linear layers over patches."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.module import GroupSize, VoteOptions
from arb_ternary_vision.convolution_ops import convolution
from arb_ternary_vision.patches import places, unfold_rows

Pair = tuple[int, int]


class ConvolutionOptions(VoteOptions, total=False):
    """Options that a convolution hands to the linear over its patches; see
    :class:`TernaryLinear`.
    """

    bias: bool
    group_size: GroupSize
    activations: str
    exponent_offset: int
    device: torch.device | str | None


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else value


class TernaryConv2d(TernaryLinear):
    """Two-dimensional convolution: the weight is ``[N, C * kh * kw]``, applied to unfolded patches.

    Each patch is one row of activations with its own int8 scale. Zero padding; no groups.

    Args:
        in_channels: ``C``.
        out_channels: ``N``.
        kernel_size: height and width.
        stride: step between patches.
        padding: zeros around the input.
        dilation: distance between the taps.
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
        height, width = _pair(kernel_size)
        super().__init__(in_channels * height * width, out_channels, **options)
        self.out_channels = out_channels
        self.kernel_size = (height, width)
        self.stride = _pair(stride)
        self.padding = _pair(padding)
        self.dilation = _pair(dilation)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve ``x [B, C, H, W]`` (float) to ``[B, N, H', W']``, channels last in memory."""
        window = (*self.kernel_size, *self.dilation, *self.padding, *self.stride)
        size = (x.shape[0], *places(x.shape[2:], window), self.out_channels)
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
    """One-dimensional convolution: ``[B, C, L]`` to ``[B, N, L']``; see :class:`TernaryConv2d` for
    the arguments.
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
