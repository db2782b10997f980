"""A decoder that writes a text about an image, ternary unless the config says otherwise.

Shapes: ``B`` images, ``C`` channels, ``H`` and ``W`` pixels, ``L`` patches, ``S`` characters, ``T`` positions that a
character may see, patches included, ``D`` width, ``V`` characters of the vocabulary.
"""

from __future__ import annotations

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
from arb_ternary_vision.models.patch_embedding import PatchEmbedding, patch_positions

__all__ = ["AboutImage", "Captioner", "CaptionerConfig", "build"]


class Captioner(Transformer):
    """Patches through blocks of their own, then a decoder of text that they are the beginning of.

    The patches see each other, in both (a prefix language model: Raffel et al., 2020; with images, Beyer et al.,
    PaliGemma, 2024); a character sees all patches, and the characters up to itself.

    Args:
        options: of the model.
        vocabulary_size: ``V``.
    """

    grows: ClassVar[bool] = False

    def __init__(self, options: CaptionerConfig, vocabulary_size: int) -> None:
        config = options.text
        super().__init__(config, vocabulary_size)
        self.options = options
        self.patches = PatchEmbedding(options)
        self.image_blocks = nn.ModuleList(Block(options.decoder) for _ in range(options.image_layers))
        self.embedding = make_embedding(config, vocabulary_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = make_norm(config, config.width, gain=True)
        self.head = make_linear(config, config.width, vocabulary_size, part="head")

    @property
    def prefix(self) -> int:
        """``L``: positions before the text."""
        rows, columns = self.options.grid
        return rows * columns

    def forward(self, tokens_BS: Tensor, images: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """Logits ``[B, S, V]`` of the character that follows each.

        Args:
            tokens_BS: ids of characters, int64.
            images: float ``[B, C, H, W]``; None where ``cache`` has seen them.
            cache: what earlier calls have seen; ``tokens_BS`` continue it, and it is advanced.

        Raises:
            UsageProblem: there is no image, or one of another shape than the model was made for, or the text is too
                long.
        """
        if tokens_BS.size(1) > self.options.max_length:
            raise UsageProblem(
                f"tokens: a text of {tokens_BS.size(1)} characters exceeds max_length, {self.options.max_length}",
                "Give shorter texts, or train the model with a larger max_length.",
            )
        x_BSD = self.embed(tokens_BS)
        if cache is not None and cache.length:
            if images is not None:
                raise UsageProblem("images: the cache has seen them already", "Leave them out, or make a new cache.")
            return self.logits(self._run(x_BSD, self.blocks, cache))
        if images is None:
            raise UsageProblem("images: a text is written about an image, and there is none")
        x_BTD = torch.cat((self.image_states(images), x_BSD), dim=1)
        return self.logits(self._run(x_BTD, self.blocks, cache)[:, self.prefix :])

    def image_states(self, images_BCHW: Tensor) -> Tensor:
        """What the blocks of the text are given of images: ``[B, L, D]``."""
        x_BLD: Tensor = self.patches(images_BCHW)
        if self._dtype is not None:
            x_BLD = x_BLD.to(self._dtype)
        return self._run_at(x_BLD, self.image_blocks, patch_positions(self.options, x_BLD), None)

    def new_cache(self, images_BCHW: Tensor) -> KeyValueCache:
        """A cache that has seen these images; texts about them go on from it."""
        states_BLD = self.image_states(images_BCHW)
        limit = self.config.max_length
        cache = KeyValueCache(len(self.blocks), len(states_BLD), window=None, limit=limit)
        self._run(states_BLD, self.blocks, cache)
        return cache

    def _positions(self, x_BSD: Tensor, cache: KeyValueCache | None) -> Positions:
        config, (batch, length, _), device = self.config, x_BSD.shape, x_BSD.device
        start, span = (0, None) if cache is None else (cache.length, cache.reserve(batch, length))
        cos_SP, sin_SP = rotary_angles(
            start,
            length,
            config.rotary_features,
            config.rotary_base,
            dtype=torch.promote_types(x_BSD.dtype, torch.float32),
            device=device,
        )
        query_S1 = torch.arange(start, start + length, device=device)[:, None]
        key_T = torch.arange(start + length, device=device)
        mask_ST = (key_T <= query_S1) | (key_T < self.prefix)
        return Positions(cos_SP, sin_SP, mask_ST, is_causal=False, span=span)


class AboutImage:
    """A captioner that has an image in front of it, as ``arb_ternary_text.models.generate.generate`` takes models.

    Args:
        model: the captioner.
        image_CHW: float ``[C, H, W]``.
    """

    #: Every character sees all of the text before it.
    sliding_window = None

    def __init__(self, model: Captioner, image_CHW: Tensor) -> None:
        self._model = model
        self._image = image_CHW

    @property
    def vocabulary_size(self) -> int:
        """``V``."""
        return self._model.vocabulary_size

    @property
    def max_length(self) -> int:
        """Longest text, in characters."""
        return self._model.options.max_length

    def new_cache(self, batch_size: int) -> KeyValueCache:
        """A cache for so many texts about the image."""
        return self._model.new_cache(self._image.expand(batch_size, *self._image.shape))

    def __call__(self, tokens_BS: Tensor, cache: KeyValueCache) -> Tensor:
        """Logits ``[B, S, V]`` of what follows."""
        logits_BSV: Tensor = self._model(tokens_BS, cache=cache)
        return logits_BSV


def build(config: CaptionerConfig, vocabulary_size: int) -> Captioner:
    """The factory that the ``captioner`` model registers."""
    return Captioner(config, vocabulary_size)
