"""A diffusion transformer (Peebles and Xie, 2023), ternary unless the config says otherwise.

Shapes: ``B`` images, ``C`` channels, ``H`` and ``W`` rows and columns of pixels, ``L`` patches,
``K`` numbers of a patch, ``D`` width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from arb_ternary_diffusion.models.config import DiTConfig
from arb_ternary_diffusion.models.denoiser import DenoisingModel
from arb_ternary_text.models.attention import Positions
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.parts import make_linear, make_norm, make_zero
from arb_ternary_vision.models.patch_embedding import PatchEmbedding
from arb_ternary_vision.models.positions import patch_positions


class DiTBlock(nn.Module):
    """The layers of the decoder's block, modulated by the condition.

    ``x + c (1 + g) f(norm(x) (1 + s) + b)`` with ``c = 2**residual_scale``, first for attention,
    then for the feed-forward layer. Scale ``s``, shift ``b`` and gate ``g`` start at zero. The gate
    of Peebles and Xie is ``g`` instead of ``1 + g``; their block starts as the identity, and the
    layers in it would get no votes.

    Args:
        config: the options of its parts.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.layers = Block(config)
        self.norm = make_norm(config, config.width, gain=False)
        self.modulation = make_linear(config, config.width, 6 * config.width)
        make_zero(self.modulation)

    def forward(self, x_BLD: Tensor, condition_BD: Tensor, positions: Positions) -> Tensor:
        """Return the residual stream after the block."""
        modulation_B1D = self.modulation(condition_BD)[:, None].chunk(6, dim=-1)
        scale, shift, gate, forward_scale, forward_shift, forward_gate = modulation_B1D
        attended_BLD = self.layers.attention(self.norm(x_BLD) * (1 + scale) + shift, positions)
        x_BLD = torch.add(x_BLD, (1 + gate) * attended_BLD, alpha=self.layers.residual_scale)
        fed_BLD = self.layers.feed_forward(self.norm(x_BLD) * (1 + forward_scale) + forward_shift)
        return torch.add(x_BLD, (1 + forward_gate) * fed_BLD, alpha=self.layers.residual_scale)


class DiT(DenoisingModel):
    """Patches, blocks, final norm, and a head that predicts the pixels of each patch.

    Args:
        options: the options of the model.
        classes: number of classes of the data.
    """

    options: DiTConfig

    def __init__(self, options: DiTConfig, classes: int) -> None:
        super().__init__(options, classes)
        config = options.parts
        down, across = options.patch_sides
        self.embedding = PatchEmbedding(options)
        self.blocks = nn.ModuleList(DiTBlock(config) for _ in range(options.layers))
        self.final_norm = make_norm(config, config.width, gain=True)
        self.head = make_linear(config, config.width, options.channels * down * across, part="head")

    def denoise(self, images_BCHW: Tensor, condition_BD: Tensor) -> Tensor:
        """Return the output of the head, ``[B, C, H, W]``."""
        x_BLD: Tensor = self.embedding(images_BCHW)
        positions = patch_positions(self.options, x_BLD)
        for block in self.blocks:
            x_BLD = self.run_block(block, len(x_BLD), x_BLD, condition_BD, positions)
        return self.join_patches(self.head(self.final_norm(x_BLD)))

    def join_patches(self, patches_BLK: Tensor) -> Tensor:
        """Put patches back to the place where they were cut, ``[B, C, H, W]``."""
        rows, columns = self.options.grid
        down, across = self.options.patch_sides
        channels = self.options.channels
        grid = patches_BLK.view(-1, rows, columns, channels, down, across)
        return grid.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, rows * down, columns * across)


def build(config: DiTConfig, vocabulary_size: int) -> DiT:
    """Build the ``dit`` model; ``vocabulary_size`` is the number of classes."""
    return DiT(config, vocabulary_size)
