"""Parts of models of images, ternary or float as ``float_parts`` says; beside those of
``arb_ternary_text.models``.

Shapes: ``B`` images, ``C`` channels, ``H`` and ``W`` rows and columns of pixels, ``L`` patches,
``K`` numbers of a patch, ``N`` output channels, ``D`` width, ``P`` planes that turn.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_text.models.attention import Positions
from arb_ternary_text.models.config import DecoderConfig, FloatPart
from arb_ternary_text.models.parts import FloatLinear, make_linear, make_norm
from arb_ternary_text.models.rotary import rotary_angles
from arb_ternary_vision.convolution import TernaryConv2d
from arb_ternary_vision.sizes import Pair, pair


class Geometry(NamedTuple):
    """Where a convolution reads: height and width of each."""

    kernel_size: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    def patches(self, x_BCHW: Tensor) -> Tensor:
        """What each output reads, ``[B, L, K]`` with ``K = C kh kw``; zeros beyond the edge."""
        return F.unfold(
            x_BCHW, self.kernel_size, self.dilation, self.padding, self.stride
        ).transpose(1, 2)

    def images(self, y_BLN: Tensor, size: Pair) -> Tensor:
        """Outputs ``[B, L, N]`` as images ``[B, N, H', W']``; ``size``: height and width of the
        input.
        """
        return y_BLN.transpose(1, 2).reshape(y_BLN.size(0), y_BLN.size(2), *self.output_size(size))

    def output_size(self, size: Pair) -> Pair:
        """Height and width of the output for an input of ``size``."""
        spans = zip(size, self.padding, self.dilation, self.kernel_size, self.stride, strict=True)
        height, width = (
            (side + 2 * pad - gap * (taps - 1) - 1) // step + 1
            for side, pad, gap, taps, step in spans
        )
        return height, width


class FloatConv2d(FloatLinear):
    """The float twin of ``TernaryConv2d``: a linear, without bias, of weight ``[N, C kh kw]`` over
    patches.

    With ``activations="int8"`` each patch is rounded to int8 by its largest element, as there. What
    replaces it keeps ``geometry``.

    Args:
        in_channels: ``C``.
        out_channels: ``N``.
        geometry: kernel, stride, zero padding and dilation.
        activations: see :class:`~arb_ternary_text.models.parts.FloatLinear`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        geometry: Geometry,
        *,
        activations: Literal["int8", "float"] = "float",
    ) -> None:
        height, width = geometry.kernel_size
        super().__init__(in_channels * height * width, out_channels, activations=activations)
        self.geometry = geometry

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # nn.Linear's own name
        """Convolve ``[B, C, H, W]`` to ``[B, N, H', W']``."""
        y_BLN = super().forward(self.geometry.patches(input))
        return self.geometry.images(y_BLN, (input.size(2), input.size(3)))

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, "
            f"{', '.join(f'{key}={value}' for key, value in self.geometry._asdict().items())}"
        )


def make_conv(
    config: DecoderConfig,
    in_channels: int,
    out_channels: int,
    kernel_size: int | Pair,
    *,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    part: FloatPart = "linears",
) -> FloatConv2d | TernaryConv2d:
    """A two-dimensional convolution without bias, ``[B, C, H, W] -> [B, N, H', W']``.

    Args:
        config: its ``float_parts``, ``group_size``, ``activations``, ``gradients``, ``scale_rule``
            and ``vote_bits``.
        in_channels: ``C``.
        out_channels: ``N``.
        kernel_size: height and width.
        stride: step between patches.
        padding: zeros around the input.
        dilation: distance between the taps.
        part: the one of ``float_parts`` that makes it float.
    """
    geometry = Geometry(pair(kernel_size), pair(stride), pair(padding), pair(dilation))
    if part in config.float_parts:
        return FloatConv2d(in_channels, out_channels, geometry, activations=config.activations)
    return TernaryConv2d(
        in_channels,
        out_channels,
        **geometry._asdict(),
        group_size=config.exponent_groups,
        activations=config.activations,
        gradients=config.gradients,
        scale_rule=config.scale_rule,
        vote_bits=config.vote_bits,
    )


class Patches(nn.Module):
    """Cuts images into patches that do not overlap, row by row, and maps each to a vector.

    That is the convolution whose stride is its kernel: a linear over ``C p q`` numbers.

    Args:
        linear: that linear, ``[..., C p q] -> [..., D]``.
        channels: ``C``.
        patch_size: height ``p`` and width ``q`` of a patch, in pixels.
    """

    def __init__(
        self, linear: FloatLinear | TernaryLinear, channels: int, patch_size: Pair
    ) -> None:
        super().__init__()
        self.linear = linear
        self.channels = channels
        self.patch_size = patch_size

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """``[B, C, H, W] -> [B, L, D]`` with ``L = H / p * W / q``.

        Raises:
            UsageProblem: other channels, or sides that patches do not divide.
        """
        batch, channels, height, width = images_BCHW.shape
        down, across = self.patch_size
        if channels != self.channels:
            raise UsageProblem(
                f"images: {channels} channels, and the patch embedding was made for {self.channels}"
            )
        if height % down or width % across:
            raise UsageProblem(
                f"images: {height} x {width} pixels do not divide into patches of {down} x "
                f"{across}",
                "Choose a patch_size that divides both sides of image_size.",
            )
        cut = images_BCHW.view(batch, channels, height // down, down, width // across, across)
        patches_BLK = cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * down * across)
        embedded_BLD: Tensor = self.linear(patches_BLK)
        return embedded_BLD

    def extra_repr(self) -> str:
        return f"channels={self.channels}, patch_size={self.patch_size}"


def make_patches(config: DecoderConfig, channels: int, patch_size: int | Pair) -> Patches:
    """The patch embedding of ``config.width`` features; float where ``float_parts`` names
    embedding.
    """
    sides = pair(patch_size)
    inside = channels * sides[0] * sides[1]
    return Patches(make_linear(config, inside, config.width, part="embedding"), channels, sides)


class ChannelNorm(nn.Module):
    """RMSNorm of each pixel over its channels, ``[B, C, H, W]`` to the same.

    Args:
        norm: a norm over the last dimension, of ``C`` features.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """``x`` normalised, in its dtype."""
        normed_BHWC: Tensor = self.norm(x_BCHW.movedim(1, -1))
        return normed_BHWC.movedim(-1, 1)


def make_channel_norm(config: DecoderConfig, channels: int, *, gain: bool = True) -> ChannelNorm:
    """A norm over channels; ``gain`` as in :func:`arb_ternary_text.models.parts.make_norm`."""
    return ChannelNorm(make_norm(config, channels, gain=gain))


def grid_positions(
    config: DecoderConfig,
    size: Pair,
    *,
    leading: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Positions:
    """Rotary positions of a grid of patches, row by row, in which every patch sees every other.

    Half of a head's planes turn by the row, the other half by the column (Heo et al., "Rotary
    Position Embedding for Vision Transformer", 2024, axial), each as fast as those of a text model
    with heads of half the size. The product of a query and a key then depends on how far apart they
    are down and across, and on nothing else.

    Args:
        config: its heads, ``rotary_base``, ``rotary_scaling``.
        size: rows and columns of patches.
        leading: positions before the first patch that do not turn, such as a class token.
        dtype: of the residual stream; angles have float32 at least.
        device: of the result.

    Raises:
        UsageProblem: heads have no even number of planes.
    """
    features = config.rotary_features
    if features % 4:
        raise UsageProblem(
            f"head_dim: {features} features are {features // 2} planes, which rows and columns "
            f"cannot share evenly",
            "Choose width and heads so that width / heads is a multiple of 4.",
        )
    (rows, columns) = size
    place = torch.device(device)
    angles = [
        rotary_angles(
            0,
            side,
            features // 2,
            config.rotary_base,
            scaling=config.rotary_scaling,
            dtype=torch.promote_types(dtype, torch.float32),
            device=place,
        )
        for side in (rows, columns)
    ]
    turns = []
    for of_rows, of_columns, still in zip(*angles, (1.0, 0.0), strict=True):
        down_HWP = of_rows[:, None].expand(-1, columns, -1)
        across_HWP = of_columns[None].expand(rows, -1, -1)
        grid_SP = torch.cat((down_HWP, across_HWP), dim=-1).flatten(0, 1)
        turns.append(F.pad(grid_SP, (0, 0, leading, 0), value=still))
    return Positions(turns[0], turns[1], mask=None, is_causal=False)
