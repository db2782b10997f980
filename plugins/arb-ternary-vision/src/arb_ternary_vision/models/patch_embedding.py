"""Turn images into the residual stream of their patches.

Shapes: ``B`` images, ``C`` channels, ``H`` and ``W`` rows and columns of pixels, ``L`` patches,
``D`` width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.embedding import TernaryEmbedding
from arb_ternary_text.models.parts import make_embedding, make_linear
from arb_ternary_vision.models.config import ImageModelConfig
from arb_ternary_vision.models.vit_config import PatchModelConfig
from arb_ternary_vision.sizes import Pair


def check_images(options: ImageModelConfig, images_BCHW: Tensor) -> None:
    """Check that a model of ``options`` was made for images of this shape.

    Raises:
        UsageProblem: it was not.
    """
    if images_BCHW.dim() != 4:
        raise UsageProblem(f"images: must be [B, C, H, W], not of shape {list(images_BCHW.shape)}")
    expected = (options.channels, *options.sides)
    found = tuple(images_BCHW.shape[1:])
    if found != expected:
        raise UsageProblem(
            f"images: they have {found[0]} channels of {found[1]} x {found[2]} pixels; the model's "
            f"channels is {expected[0]} and its image_size is [{expected[1]}, {expected[2]}]",
            f"Set channels: {found[0]} and image_size: [{found[1]}, {found[2]}] in `model:`, or "
            f"use other images.",
        )


class Patches(nn.Module):
    """Cuts images into patches that do not overlap, row by row, and maps each to a vector.

    This is a convolution whose stride is its kernel size.

    Args:
        linear: maps the ``C p q`` numbers of a patch to ``D``.
        patch_size: height ``p`` and width ``q`` of a patch, in pixels; they divide the image.
    """

    def __init__(self, linear: nn.Module, patch_size: Pair) -> None:
        super().__init__()
        self.linear = linear
        self.patch_size = patch_size

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Map ``[B, C, H, W]`` to ``[B, L, D]`` with ``L = H / p * W / q``."""
        batch, channels, height, width = images_BCHW.shape
        down, across = self.patch_size
        grid = images_BCHW.view(batch, channels, height // down, down, width // across, across)
        patches_BLK = grid.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * down * across)
        embedded_BLD: Tensor = self.linear(patches_BLK)
        return embedded_BLD

    def extra_repr(self) -> str:
        return f"patch_size={self.patch_size}"


class PatchEmbedding(nn.Module):
    """Maps patches to vectors and adds the learned vector of each position, if there are any.

    Args:
        options: the options of the model.
    """

    def __init__(self, options: PatchModelConfig) -> None:
        super().__init__()
        config = options.decoder
        self._options = options
        down, across = options.patch_sides
        linear = make_linear(
            config, options.channels * down * across, config.width, part="embedding"
        )
        self.patches = Patches(linear, options.patch_sides)
        self.places: nn.Embedding | TernaryEmbedding | None = None
        if options.has_learned_positions and "embedding" in options.float_parts:
            self.places = nn.Embedding(config.max_length, config.width)
        elif options.has_learned_positions:
            self.places = make_embedding(config, config.max_length)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Map float ``[B, C, H, W]`` to ``[B, L, D]``, patches row by row.

        Raises:
            UsageProblem: the model was made for images of another shape.
        """
        check_images(self._options, images_BCHW)
        x_BLD: Tensor = self.patches(images_BCHW)
        if self.places is not None:
            index_L = torch.arange(x_BLD.size(1), device=x_BLD.device)
            x_BLD = x_BLD + self.places(index_L).to(x_BLD.dtype)
        return x_BLD
