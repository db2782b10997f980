"""Convolutions with ternary weights, as linear layers over patches."""

from __future__ import annotations

import torch
from torch import Tensor

from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.module import GroupSize, ScaleRule

__all__ = ["TernaryConv1d", "TernaryConv2d"]

Pair = tuple[int, int]


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
        bias: add an integer bias.
        group_size: columns that share an exponent.
        activations: ``int8`` or ``float``.
        gradients: ``float`` or ``int8``.
        exponent_offset: added to the fan-in scaled initial exponent.
        scale_rule: ``residual`` or ``frozen``.
        vote_bits: of an accumulator: 8, 4 or 2.
        backend: owner of the layout; None takes the current one.
        device: of the buffers.
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
        bias: bool = False,
        group_size: GroupSize = 128,
        activations: str = "int8",
        gradients: str = "float",
        exponent_offset: int = 0,
        scale_rule: ScaleRule = "residual",
        vote_bits: int = 8,
        backend: str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self_kernel = _pair(kernel_size)
        super().__init__(
            in_channels * self_kernel[0] * self_kernel[1],
            out_channels,
            bias=bias,
            group_size=group_size,
            activations=activations,
            gradients=gradients,
            exponent_offset=exponent_offset,
            scale_rule=scale_rule,
            vote_bits=vote_bits,
            backend=backend,
            device=device,
        )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = self_kernel
        self.stride = _pair(stride)
        self.padding = _pair(padding)
        self.dilation = _pair(dilation)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve ``x [B, C, H, W]`` (float) to ``[B, N, H', W']``."""
        patches_BKL = torch.nn.functional.unfold(x, self.kernel_size, self.dilation, self.padding, self.stride)
        y_BLN = super().forward(patches_BKL.transpose(1, 2))
        height, width = (
            (x.shape[2 + i] + 2 * self.padding[i] - self.dilation[i] * (self.kernel_size[i] - 1) - 1) // self.stride[i]
            + 1
            for i in (0, 1)
        )
        return y_BLN.transpose(1, 2).reshape(x.shape[0], self.out_channels, height, width)


class TernaryConv1d(TernaryConv2d):
    """One-dimensional convolution: ``[B, C, L]`` to ``[B, N, L']``; see :class:`TernaryConv2d` for the arguments."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        bias: bool = False,
        group_size: GroupSize = 128,
        activations: str = "int8",
        gradients: str = "float",
        exponent_offset: int = 0,
        scale_rule: ScaleRule = "residual",
        vote_bits: int = 8,
        backend: str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            (1, kernel_size),
            stride=(1, stride),
            padding=(0, padding),
            dilation=(1, dilation),
            bias=bias,
            group_size=group_size,
            activations=activations,
            gradients=gradients,
            exponent_offset=exponent_offset,
            scale_rule=scale_rule,
            vote_bits=vote_bits,
            backend=backend,
            device=device,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Convolve ``x [B, C, L]`` (float) to ``[B, N, L']``."""
        return super().forward(x.unsqueeze(2)).squeeze(2)
