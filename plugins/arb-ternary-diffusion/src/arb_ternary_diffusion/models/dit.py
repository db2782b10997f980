"""A diffusion transformer (Peebles and Xie, 2023) of the decoder's blocks, ternary unless the
config says otherwise.

Shapes: ``B`` images, ``C`` channels, ``H`` and ``W`` pixels, ``L`` patches, ``K`` numbers of a
patch, ``D`` width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from arb_ternary_diffusion.models.config import DiTConfig
from arb_ternary_diffusion.models.denoiser import DenoisingModel, zero_
from arb_ternary_text.models.attention import Positions
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.parts import make_linear, make_norm
from arb_ternary_vision.models.patch_embedding import PatchEmbedding, patch_positions


class DiTBlock(nn.Module):
    """The layers of the decoder's block, whose inputs the condition scales and shifts, and whose
    updates it gates.

    ``x + c (1 + g) f(norm(x) (1 + s) + b)``, ``c = 2**residual_scale``: attention, then the
    feed-forward layer. At birth ``s``, ``b`` and ``g`` are zero. Peebles and Xie's gate is ``g``
    alone; a block that starts as nothing would give the votes of its layers nothing to start from.

    Args:
        config: options of its parts.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.layers = Block(config)
        self.norm = make_norm(config, config.width, gain=False)
        self.modulation = make_linear(config, config.width, 6 * config.width)
        zero_(self.modulation)

    def forward(self, x_BLD: Tensor, condition_BD: Tensor, positions: Positions) -> Tensor:
        """The residual stream after the block."""
        scale, shift, gate, then_scale, then_shift, then_gate = self.modulation(condition_BD)[
            :, None
        ].chunk(6, dim=-1)
        attended_BLD = self.layers.attention(self.norm(x_BLD) * (1 + scale) + shift, positions)
        x_BLD = torch.add(x_BLD, (1 + gate) * attended_BLD, alpha=self.layers.residual_scale)
        fed_BLD = self.layers.feed_forward(self.norm(x_BLD) * (1 + then_scale) + then_shift)
        return torch.add(x_BLD, (1 + then_gate) * fed_BLD, alpha=self.layers.residual_scale)


class DiT(DenoisingModel):
    """Patches, blocks, final norm, and a head that gives each patch its pixels.

    Args:
        options: of the model.
        classes: see :class:`~arb_ternary_diffusion.models.denoiser.DenoisingModel`.
    """

    options: DiTConfig

    def __init__(self, options: DiTConfig, classes: int) -> None:
        super().__init__(options, classes)
        config = options.parts
        (down, across) = options.patch_sides
        self.embedding = PatchEmbedding(options)
        self.blocks = nn.ModuleList(DiTBlock(config) for _ in range(options.layers))
        self.final_norm = make_norm(config, config.width, gain=True)
        self.head = make_linear(config, config.width, options.channels * down * across, part="head")

    def denoise(self, images_BCHW: Tensor, condition_BD: Tensor) -> Tensor:
        """See :class:`~arb_ternary_diffusion.models.denoiser.DenoisingModel`."""
        x_BLD: Tensor = self.embedding(images_BCHW)
        positions = patch_positions(self.options, x_BLD)
        for block in self.blocks:
            x_BLD = self.run_block(block, x_BLD, condition_BD, positions)
        return self.joined(self.head(self.final_norm(x_BLD)))

    def joined(self, patches_BLK: Tensor) -> Tensor:
        """Patches put back where they were cut, ``[B, C, H, W]``."""
        (rows, columns) = self.options.grid
        (down, across) = self.options.patch_sides
        channels = self.options.channels
        cut = patches_BLK.view(-1, rows, columns, channels, down, across)
        return cut.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, rows * down, columns * across)


def build(config: DiTConfig, vocabulary_size: int) -> DiT:
    """The factory that the ``dit`` model registers; ``vocabulary_size``: classes."""
    return DiT(config, vocabulary_size)
