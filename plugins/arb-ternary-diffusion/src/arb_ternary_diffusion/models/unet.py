"""A U-Net of convolutions with time and class, ternary unless the config says otherwise.

Shapes: ``B`` images, ``C`` channels, ``H`` and ``W`` rows and columns of pixels, ``D`` width of the
condition, ``N`` channels of a level.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arb_ternary_diffusion.models.config import UNetConfig
from arb_ternary_diffusion.models.denoiser import DenoisingModel
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.parts import make_linear, make_zero
from arb_ternary_vision.models.parts import make_channel_norm, make_channel_sub_norm, make_conv


class ResidualBlock(nn.Module):
    """``skip(x) + c down(norm(relu(up(norm(x)) + condition)^2))`` with ``c = 2**residual_scale``.

    There is no bias.

    Args:
        config: the options of its parts; its width is that of the condition.
        inputs: channels of the input.
        outputs: channels of the output; if they are those of the input, ``skip`` is the identity.
    """

    def __init__(self, config: DecoderConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.residual_scale = 2.0**config.residual_scale
        self.norm = make_channel_norm(config, inputs)
        self.up = make_conv(config, inputs, outputs, 3, padding=1)
        self.condition = make_linear(config, config.width, outputs)
        make_zero(self.condition)
        self.hidden_norm = make_channel_sub_norm(config, outputs)
        self.down = make_conv(config, outputs, outputs, 3, padding=1)
        self.skip = nn.Identity() if inputs == outputs else make_conv(config, inputs, outputs, 1)
        if config.zero_residual:
            make_zero(self.down)

    def forward(self, x_BNHW: Tensor, condition_BD: Tensor) -> Tensor:
        """Return the residual stream after the block."""
        hidden_BNHW = self.up(self.norm(x_BNHW)) + self.condition(condition_BD)[:, :, None, None]
        update_BNHW = self.down(self.hidden_norm(F.relu(hidden_BNHW).square()))
        return torch.add(self.skip(x_BNHW), update_BNHW, alpha=self.residual_scale)


class Level(nn.Module):
    """The blocks of one resolution, down and up, and the convolutions to and from the next lower.

    Args:
        config: the options of its parts.
        channels: channels of this resolution.
        layers: number of blocks in each direction.
        last: whether there is no lower resolution.
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
    """Down through the levels and up again.

    Each block on the way up also reads the output of its counterpart on the way down.

    Args:
        options: the options of the model.
        classes: number of classes of the data.
    """

    options: UNetConfig

    def __init__(self, options: UNetConfig, classes: int) -> None:
        super().__init__(options, classes)
        config = options.parts
        width = options.width
        last = options.levels - 1
        self.embedding = make_conv(config, options.channels, width, 3, padding=1, part="embedding")
        self.levels = nn.ModuleList(
            Level(config, width << number, options.layers, last=number == last)
            for number in range(options.levels)
        )
        lowest = width << last
        self.middle = ResidualBlock(config, lowest, lowest)
        self.final_norm = make_channel_norm(config, width)
        self.head = make_conv(config, width, options.channels, 3, padding=1, part="head")

    def denoise(self, images_BCHW: Tensor, condition_BD: Tensor) -> Tensor:
        """Return the output of the head, ``[B, C, H, W]``."""
        batch = len(images_BCHW)
        x: Tensor = self.embedding(images_BCHW)
        skipped: list[Tensor] = []
        levels = [level for level in self.levels if isinstance(level, Level)]
        for level in levels:
            for block in level.down:
                x = self.run_block(block, batch, x, condition_BD)
                skipped.append(x)
            if level.to_lower is not None:
                x = level.to_lower(x)
        x = self.run_block(self.middle, batch, x, condition_BD)
        for level in reversed(levels):
            if level.from_lower is not None:
                x = level.from_lower(x).repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
            for block in level.up:
                x = self.run_block(block, batch, torch.cat((x, skipped.pop()), dim=1), condition_BD)
        predicted: Tensor = self.head(self.final_norm(x))
        return predicted


def build(config: UNetConfig, vocabulary_size: int) -> UNet:
    """Build the ``unet`` model; ``vocabulary_size`` is the number of classes."""
    return UNet(config, vocabulary_size)
