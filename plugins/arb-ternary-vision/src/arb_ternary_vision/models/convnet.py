"""A residual convolutional network (He et al., 2016), ternary unless the config says otherwise.

Shapes: ``B`` images, ``C`` channels, ``H`` and ``W`` rows and columns of pixels, ``V`` classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem
from arb_ternary_text.models.block_model import BlockModel
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.parts import make_linear, make_norm, make_zero
from arb_ternary_vision.models.convnet_config import ConvnetConfig
from arb_ternary_vision.models.parts import make_channel_norm, make_channel_sub_norm, make_conv
from arb_ternary_vision.models.patch_embedding import check_images


class ConvBlock(nn.Module):
    """``x + c down(norm(relu(up(norm(x)))^2))`` with ``c = 2**residual_scale``.

    With ``zero_residual`` the block starts as the identity. It gets a gradient all the same.

    Args:
        config: the options of its parts.
        channels: ``C``.
        kernel_size: kernel size of both convolutions.
    """

    def __init__(self, config: DecoderConfig, channels: int, kernel_size: int) -> None:
        super().__init__()
        padding = kernel_size // 2
        self.residual_scale = 2.0**config.residual_scale
        self.norm = make_channel_norm(config, channels)
        self.up = make_conv(config, channels, channels, kernel_size, padding=padding)
        self.hidden_norm = make_channel_sub_norm(config, channels)
        self.down = make_conv(config, channels, channels, kernel_size, padding=padding)
        if config.zero_residual:
            make_zero(self.down)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the residual stream after the block."""
        hidden_BCHW = F.relu(self.up(self.norm(x_BCHW))).square()
        update_BCHW = self.down(self.hidden_norm(hidden_BCHW))
        return torch.add(x_BCHW, update_BCHW, alpha=self.residual_scale)


class Convnet(BlockModel):
    """First convolution, stages of residual blocks, mean over the pixels, norm, head.

    A convolution of stride 2 lies between two stages.

    Args:
        options: the options of the model.
        classes: ``V``.

    Raises:
        UsageProblem: ``classes`` is less than 1.
    """

    def __init__(self, options: ConvnetConfig, classes: int) -> None:
        super().__init__()
        if classes < 1:
            raise UsageProblem(f"classes: must be at least 1, not {classes}")
        self.options = options
        self.vocabulary_size = classes
        config = options.parts
        kernel = options.kernel_size
        padding = kernel // 2
        channels = options.width
        self.embedding = make_conv(
            config, options.channels, channels, kernel, padding=padding, part="embedding"
        )
        self.blocks = nn.ModuleList()
        for stage in range(options.stages):
            if stage:
                # Made in this order, in which their weights are drawn.
                halve = make_conv(config, channels, 2 * channels, kernel, stride=2, padding=padding)
                norm = make_channel_norm(config, channels)
                self.blocks.append(nn.Sequential(norm, halve))
                channels *= 2
            self.blocks.extend(ConvBlock(config, channels, kernel) for _ in range(options.layers))
        self.final_norm = make_norm(config, channels, gain=True)
        self.head = make_linear(config, channels, classes, part="head")
        self._logit_scale = 2.0**config.logit_scale

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return the logits ``[B, V]`` of float images ``[B, C, H, W]``.

        Raises:
            UsageProblem: the model was made for images of another shape.
        """
        check_images(self.options, images_BCHW)
        x_BCHW: Tensor = self.embedding(images_BCHW)
        if self._dtype is not None:
            x_BCHW = x_BCHW.to(self._dtype)
        for block in self.blocks:
            x_BCHW = self.run_block(block, len(images_BCHW), x_BCHW)
        logits_BV: Tensor = self.head(self.final_norm(x_BCHW.mean(dim=(2, 3))))
        return logits_BV if self._logit_scale == 1.0 else logits_BV * self._logit_scale


def build(config: ConvnetConfig, vocabulary_size: int) -> Convnet:
    """Build the ``convnet`` model; ``vocabulary_size`` is the number of classes."""
    return Convnet(config, vocabulary_size)
