"""A decoder that writes a text about an image, ternary unless the config says otherwise.

Shapes: ``B`` images, ``C`` channels, ``H`` and ``W`` rows and columns of pixels, ``L`` patches,
``S`` characters, ``T`` positions that a character may see, patches included, ``D`` width, ``V``
characters of the vocabulary.
"""

from __future__ import annotations

from itertools import takewhile
from typing import ClassVar

import torch
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem
from arb_ternary_text.models.attention import Positions
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.cache import KeyValueCache
from arb_ternary_text.models.parts import make_embedding, make_linear, make_norm
from arb_ternary_text.models.rotary import rotary_angles
from arb_ternary_text.models.transformer import Transformer
from arb_ternary_vision.models.captioner_config import CaptionerConfig
from arb_ternary_vision.models.patch_embedding import PatchEmbedding
from arb_ternary_vision.models.positions import patch_positions


class Captioner(Transformer):
    """Blocks over the patches of an image, then a decoder of text with the patches as its prefix.

    Patches see each other in all blocks (a prefix language model: Raffel et al., 2020; with images:
    Beyer et al., PaliGemma, 2024). A character sees all patches, and the characters up to itself.

    Args:
        options: the options of the model.
        vocabulary_size: ``V``.
    """

    grows: ClassVar[bool] = False

    def __init__(self, options: CaptionerConfig, vocabulary_size: int) -> None:
        config = options.text
        super().__init__(config, vocabulary_size)
        self.options = options
        self.patches = PatchEmbedding(options)
        self.image_blocks = nn.ModuleList(
            Block(options.decoder) for _ in range(options.image_layers)
        )
        self.embedding = make_embedding(config, vocabulary_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = make_norm(config, config.width, gain=True)
        self.head = make_linear(config, config.width, vocabulary_size, part="head")

    def forward(self, tokens_BS: Tensor, images: Tensor | None = None) -> Tensor:
        """Return the logits ``[B, S, V]`` of the character that follows each.

        Args:
            tokens_BS: ids of characters, int64.
            images: float ``[B, C, H, W]``.

        Raises:
            UsageProblem: there is no image, the model was made for images of another shape, or the
                text is too long.
        """
        if tokens_BS.size(1) > self.options.max_length:
            raise UsageProblem(
                f"tokens: a text of {tokens_BS.size(1)} characters exceeds max_length, "
                f"{self.options.max_length}",
                "Use shorter texts, or train the model with a larger max_length.",
            )
        if images is None:
            raise UsageProblem("images: the model writes about an image, and there is none")
        x_BTD = torch.cat((self.image_states(images), self.embed(tokens_BS)), dim=1)
        return self.logits(self._run(x_BTD, self.blocks, None)[:, self.options.patches :])

    def image_states(self, images_BCHW: Tensor) -> Tensor:
        """Return the patches after the image blocks, ``[B, L, D]``."""
        x_BLD: Tensor = self.patches(images_BCHW)
        if self._dtype is not None:
            x_BLD = x_BLD.to(self._dtype)
        positions = patch_positions(self.options, x_BLD)
        return self._run_at(x_BLD, self.image_blocks, positions, None)

    @torch.no_grad()
    def write(self, images_BCHW: Tensor, end: int) -> list[list[int]]:
        """Return the ids of a text about each image, without its beginning and end.

        Each is the most likely character (the first of equals).

        Args:
            images_BCHW: float ``[B, C, H, W]``.
            end: the id that begins and ends every text.
        """
        ids_BS = torch.full((len(images_BCHW), 1), end, device=images_BCHW.device)
        for _ in range(self.options.max_length):
            next_B = self(ids_BS, images=images_BCHW)[:, -1].argmax(dim=-1)
            ids_BS = torch.cat((ids_BS, next_B[:, None]), dim=1)
            if bool((ids_BS[:, 1:] == end).any(dim=1).all()):
                break
        return [list(takewhile(lambda token: token != end, ids)) for ids in ids_BS[:, 1:].tolist()]

    def _positions(self, x_BSD: Tensor, cache: KeyValueCache | None) -> Positions:
        config = self.config
        length = x_BSD.size(1)
        device = x_BSD.device
        cos_SP, sin_SP = rotary_angles(
            0,
            length,
            config.rotary_features,
            config.rotary_base,
            dtype=torch.promote_types(x_BSD.dtype, torch.float32),
            device=device,
        )
        index_S = torch.arange(length, device=device)
        mask_SS = (index_S <= index_S[:, None]) | (index_S < self.options.patches)
        return Positions(cos_SP, sin_SP, mask_SS, is_causal=False)


def build(config: CaptionerConfig, vocabulary_size: int) -> Captioner:
    """Build the ``captioner`` model."""
    return Captioner(config, vocabulary_size)
