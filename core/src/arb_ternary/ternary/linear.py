"""The linear layer with a ternary weight, and convolutions as linear layers over patches."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from arb_ternary.backends import ops
from arb_ternary.backends.convolution import convolution, places, unfold_rows
from arb_ternary.ternary.module import GroupSize, TernaryModule, VoteOptions

Pair = tuple[int, int]


class TernaryLinear(TernaryModule):
    """``y = x @ W.T + b`` with ``W = T * 2**E`` and an optional integer bias ``b = B * 2**e``.

    In ``int8`` activation mode every row of ``x`` is quantised by its absolute maximum and the products are summed
    exactly in integers; the straight-through gradient passes the quantiser. In backward the module casts its votes; the
    weight gradient is never a parameter's ``grad``.

    Args:
        in_features: ``K``.
        out_features: ``N``.
        bias: add an integer bias: int32 ``[N]`` with one int8 exponent, voted like the trits.
        group_size: columns that share an exponent: 32, 64, 128, 256 or "row".
        activations: ``int8`` or ``float``; ``int8`` with int8 gradients makes all three products exact integers.
        exponent_offset: added to the fan-in scaled initial exponent.
        device: of the buffers.
        options: see :class:`~arb_ternary.ternary.module.VoteOptions`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        group_size: GroupSize = 128,
        activations: str = "int8",
        exponent_offset: int = 0,
        device: torch.device | str | None = None,
        **options: Unpack[VoteOptions],
    ) -> None:
        if activations not in ops.ACTIVATION_MODES:
            raise ValueError(f"activations must be one of {ops.ACTIVATION_MODES}, got {activations!r}")
        super().__init__(
            out_features,
            in_features,
            group_size=group_size,
            fan_in=in_features,
            exponent_offset=exponent_offset,
            **options,
        )
        self.in_features = in_features
        self.out_features = out_features
        self.activations = activations
        self.bias: Tensor | None
        self.bias_exponent: Tensor | None
        self.bias_votes: Tensor | None
        if bias:
            # One quantum of the bias is a sixteenth of a trit's step in the output.
            start = max(int(self.exponent.flatten()[0]) - 4, -126) if self.exponent.numel() else 0
            self.register_buffer("bias", torch.zeros(out_features, dtype=torch.int32))
            self.register_buffer("bias_exponent", torch.full((1,), start, dtype=torch.int8))
            self.register_buffer("bias_votes", torch.zeros(out_features, dtype=torch.int8))
        else:
            self.bias = self.bias_exponent = self.bias_votes = None
        if device is not None:
            self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [..., K]`` (float) to ``[..., N]`` in the dtype of ``x``."""
        return self.multiply(x, self.activations, self.integer_bias())

    def integer_bias(self) -> Tensor | None:
        """``B * 2**e`` as float32 ``[N]``; backward casts its votes."""
        if self.bias is None or self.bias_exponent is None or self.bias_votes is None:
            return None
        summed = None if self.sums is None else self.sums.bias
        votes = self.bias_votes if summed is None else summed
        bias: Tensor = ops.bias(self.vote_anchor(), self.bias, self.bias_exponent, votes)
        return bias

    @torch.no_grad()
    def apply_bias_votes(self, threshold: int) -> None:
        """Move the bias one unit where its votes (always int8) have reached ``threshold``, and clear those votes."""
        if self.bias is None or self.bias_votes is None:
            return
        crossed = (self.bias_votes >= threshold).to(torch.int32) - (self.bias_votes <= -threshold).to(torch.int32)
        self.bias += crossed
        self.bias_votes.masked_fill_(crossed != 0, 0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activations={self.activations}, bias={self.bias is not None}"


class ConvolutionOptions(VoteOptions, total=False):
    """Options that a convolution hands to the linear over its patches; see :class:`TernaryLinear`."""

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
        y_MN = convolution(self.in_autocast(x), anchor, self.integer_bias(), *self.vote_state(), window, self.gradients)
        if anchor is not None:
            self.expect_votes(y_MN)
        y: Tensor = y_MN.view(size).permute(0, 3, 1, 2)
        return y


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
