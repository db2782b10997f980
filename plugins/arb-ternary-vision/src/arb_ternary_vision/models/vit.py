"""A vision transformer (Dosovitskiy et al., 2021), ternary unless the config says otherwise.

Shapes: ``B`` images, ``C`` channels, ``H`` and ``W`` rows and columns of pixels, ``L`` patches,
``D`` width, ``V`` classes.
"""

from __future__ import annotations

from torch import Tensor, nn

from arb_ternary_text.models.attention import Positions
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.cache import KeyValueCache
from arb_ternary_text.models.parts import make_linear, make_norm
from arb_ternary_text.models.transformer import Transformer
from arb_ternary_vision.models.patch_embedding import PatchEmbedding
from arb_ternary_vision.models.positions import patch_positions
from arb_ternary_vision.models.vit_config import VitConfig


class Vit(Transformer):
    """Patches, blocks in which every patch sees every other, mean over the patches, norm, head.

    The mean replaces a class token, which is one more vector to learn and no better (Beyer et al.,
    "Better plain ViT baselines", 2022).

    Args:
        options: the options of the model.
        classes: ``V``.
    """

    def __init__(self, options: VitConfig, classes: int) -> None:
        config = options.decoder
        super().__init__(config, classes)
        self.options = options
        self.embedding = PatchEmbedding(options)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = make_norm(config, config.width, gain=True)
        self.head = make_linear(config, config.width, classes, part="head")

    def logits(self, x_BLD: Tensor) -> Tensor:
        """Apply mean, final norm and head: ``[B, L, D]`` to ``[B, V]``."""
        return super().logits(x_BLD.mean(dim=1))

    def _positions(self, x_BLD: Tensor, cache: KeyValueCache | None) -> Positions:
        return patch_positions(self.options, x_BLD)


def build(config: VitConfig, vocabulary_size: int) -> Vit:
    """Build the ``vit`` model; ``vocabulary_size`` is the number of classes."""
    return Vit(config, vocabulary_size)
