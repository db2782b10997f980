"""From images to the residual stream of their patches.

Shapes: ``B`` images, ``C`` channels, ``H`` and ``W`` pixels, ``L`` patches, ``D`` width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.embedding import TernaryEmbedding
from arb_ternary_text.models.attention import Positions
from arb_ternary_vision.models.config import ImageModelConfig
from arb_ternary_vision.models.vit_config import PatchModelConfig
from arb_ternary_vision.parts import grid_positions, make_patches


def check_images(options: ImageModelConfig, images_BCHW: Tensor) -> None:
    """UsageProblem where ``images`` are not those that a model of ``options`` was made for."""
    expected = (options.channels, *options.sides)
    found = tuple(images_BCHW.shape[1:])
    if images_BCHW.dim() != 4:
        raise UsageProblem(f"images: must be [B, C, H, W], not of shape {list(images_BCHW.shape)}")
    if found != expected:
        raise UsageProblem(
            f"images: they have {found[0]} channels of {found[1]} x {found[2]} pixels; the model's "
            f"channels is {expected[0]} and its image_size is [{expected[1]}, {expected[2]}]",
            f"Set channels: {found[0]} and image_size: [{found[1]}, {found[2]}] in `model:`, or "
            f"take other images.",
        )


class PatchEmbedding(nn.Module):
    """Patches as vectors, to which the vector of their place is added where the options ask for it.

    Args:
        options: of the model.
    """

    def __init__(self, options: PatchModelConfig) -> None:
        super().__init__()
        config = options.decoder
        self._options = options
        self.patches = make_patches(config, options.channels, options.patch_sides)
        self.places: nn.Embedding | TernaryEmbedding | None = None
        if options.has_places and "embedding" in options.float_parts:
            self.places = nn.Embedding(config.max_length, config.width)
        elif options.has_places:
            self.places = TernaryEmbedding(
                config.max_length,
                config.width,
                gradients=config.gradients,
                scale_rule=config.scale_rule,
                vote_bits=config.vote_bits,
            )

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Float ``[B, C, H, W]`` to ``[B, L, D]``, patches row by row.

        Raises:
            UsageProblem: images of another shape than the model was made for.
        """
        check_images(self._options, images_BCHW)
        x_BLD: Tensor = self.patches(images_BCHW)
        if self.places is not None:
            place_L = torch.arange(x_BLD.size(1), device=x_BLD.device)
            x_BLD = x_BLD + self.places(place_L).to(x_BLD.dtype)
        return x_BLD


def patch_positions(options: PatchModelConfig, x_BLD: Tensor) -> Positions:
    """Positions of the patches ``x``: rotary ones; where positions are learned alone, they are in
    ``x`` already.
    """
    config = options.decoder
    if options.turns:
        return grid_positions(config, options.grid, dtype=x_BLD.dtype, device=x_BLD.device)
    dtype = torch.promote_types(x_BLD.dtype, torch.float32)
    cos_LP = torch.ones(
        x_BLD.size(1), config.rotary_features // 2, dtype=dtype, device=x_BLD.device
    )
    return Positions(cos_LP, torch.zeros_like(cos_LP), mask=None, is_causal=False)
