"""A U-Net of convolutions that knows time and class, ternary unless the config says otherwise.

Shapes: ``B`` images, ``C`` channels, ``H`` and ``W`` pixels, ``D`` width of the condition, ``N``
channels of a level.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arb_ternary_diffusion.models.config import UNetConfig
from arb_ternary_diffusion.models.denoiser import DenoisingModel, zero_
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.parts import make_linear
from arb_ternary_vision.parts import make_channel_norm, make_conv


class ResidualBlock(nn.Module):
    """``skip(x) + c down(norm(relu(up(norm(x)) + condition)^2))``, ``c = 2**residual_scale``; no
    bias anywhere.

    Args:
        config: options of its parts; its width is that of the condition.
        inputs: channels that come in.
        outputs: channels that go out; where they are as many, ``x`` is added as it is.
    """

    def __init__(self, config: DecoderConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.residual_scale = 2.0**config.residual_scale
        self.norm = make_channel_norm(config, inputs)
        self.up = make_conv(config, inputs, outputs, 3, padding=1)
        self.condition = make_linear(config, config.width, outputs)
        zero_(self.condition)
        self.hidden_norm = (
            make_channel_norm(config, outputs, gain=False)
            if config.has_sub_norms
            else nn.Identity()
        )
        self.down = make_conv(config, outputs, outputs, 3, padding=1)
        self.skip = nn.Identity() if inputs == outputs else make_conv(config, inputs, outputs, 1)
        if config.zero_residual:
            zero_(self.down)

    def forward(self, x_BNHW: Tensor, condition_BD: Tensor) -> Tensor:
        """``[B, N, H, W]`` with the channels that go out."""
        hidden_BNHW = self.up(self.norm(x_BNHW)) + self.condition(condition_BD)[:, :, None, None]
        update_BNHW = self.down(self.hidden_norm(F.relu(hidden_BNHW).square()))
        return torch.add(self.skip(x_BNHW), update_BNHW, alpha=self.residual_scale)


class Level(nn.Module):
    """The blocks of one resolution, on the way down and on the way up, and the ways to the next
    lower one and back.

    Args:
        config: options of its parts.
        channels: of its pictures.
        layers: blocks each way.
        last: there is no lower one.
    """

    def __init__(self, config: DecoderConfig, channels: int, layers: int, *, last: bool) -> None:
        super().__init__()
        self.down = nn.ModuleList(ResidualBlock(config, channels, channels) for _ in range(layers))
        self.up = nn.ModuleList(
            ResidualBlock(config, 2 * channels, channels) for _ in range(layers)
        )
        self.to_lower = None if last else make_conv(config, channels, 2 * channels, 2, stride=2)
        self.from_lower = None if last else make_conv(config, 2 * channels, channels, 1)


class UNet(DenoisingModel):
    """Down through the levels and up again; each block on the way up also reads what its twin on
    the way down gave.

    Args:
        options: of the model.
        classes: see :class:`~arb_ternary_diffusion.models.denoiser.DenoisingModel`.
    """

    options: UNetConfig

    def __init__(self, options: UNetConfig, classes: int) -> None:
        super().__init__(options, classes)
        config = options.parts
        width = options.width
        self.embedding = make_conv(config, options.channels, width, 3, padding=1, part="embedding")
        self.levels = nn.ModuleList(
            Level(config, width << number, options.layers, last=number == options.levels - 1)
            for number in range(options.levels)
        )
        lowest = width << (options.levels - 1)
        self.middle = ResidualBlock(config, lowest, lowest)
        self.final_norm = make_channel_norm(config, width)
        self.head = make_conv(config, width, options.channels, 3, padding=1, part="head")

    def denoise(self, images_BCHW: Tensor, condition_BD: Tensor) -> Tensor:
        """See :class:`~arb_ternary_diffusion.models.denoiser.DenoisingModel`."""
        x: Tensor = self.embedding(images_BCHW)
        seen: list[Tensor] = []
        levels = [level for level in self.levels if isinstance(level, Level)]
        for level in levels:
            for block in level.down:
                x = self.run_block(block, x, condition_BD)
                seen.append(x)
            x = x if level.to_lower is None else level.to_lower(x)
        x = self.run_block(self.middle, x, condition_BD)
        for level in reversed(levels):
            if level.from_lower is not None:
                x = level.from_lower(x).repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
            for block in level.up:
                x = self.run_block(block, torch.cat((x, seen.pop()), dim=1), condition_BD)
        predicted: Tensor = self.head(self.final_norm(x))
        return predicted


def build(config: UNetConfig, vocabulary_size: int) -> UNet:
    """The factory that the ``unet`` model registers; ``vocabulary_size``: classes."""
    return UNet(config, vocabulary_size)
