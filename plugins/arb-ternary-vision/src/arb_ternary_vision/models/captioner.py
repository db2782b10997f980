"""A decoder that writes a text about an image, ternary unless the config says otherwise.

Shapes: ``B`` images, ``C`` channels, ``H`` and ``W`` pixels, ``L`` patches, ``S`` characters, ``T``
positions that a character may see, patches included, ``D`` width, ``V`` characters of the
vocabulary.
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


class Captioner(Transformer):
    """Patches through blocks of their own, then a decoder of text that they are the beginning of.

    The patches see each other, in both (a prefix language model: Raffel et al., 2020; with images,
    Beyer et al., PaliGemma, 2024); a character sees all patches, and the characters up to itself.

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
        self.image_blocks = nn.ModuleList(
            Block(options.decoder) for _ in range(options.image_layers)
        )
        self.embedding = make_embedding(config, vocabulary_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = make_norm(config, config.width, gain=True)
        self.head = make_linear(config, config.width, vocabulary_size, part="head")

    @property
    def prefix(self) -> int:
        """``L``: positions before the text."""
        rows, columns = self.options.grid
        return rows * columns

    def forward(
        self, tokens_BS: Tensor, images: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Logits ``[B, S, V]`` of the character that follows each.

        Args:
            tokens_BS: ids of characters, int64.
            images: float ``[B, C, H, W]``; None where ``cache`` has seen them.
            cache: what earlier calls have seen; ``tokens_BS`` continue it, and it is advanced.

        Raises:
            UsageProblem: there is no image, or one of another shape than the model was made for, or
                the text is too long.
        """
        if tokens_BS.size(1) > self.options.max_length:
            raise UsageProblem(
                f"tokens: a text of {tokens_BS.size(1)} characters exceeds max_length, "
                f"{self.options.max_length}",
                "Give shorter texts, or train the model with a larger max_length.",
            )
        x_BSD = self.embed(tokens_BS)
        if cache is not None and cache.length:
            if images is not None:
                raise UsageProblem(
                    "images: the cache has seen them already",
                    "Leave them out, or make a new cache.",
                )
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

    @torch.no_grad()
    def write(
        self, images_BCHW: Tensor, end: int, *, temperature: float = 0.0, seed: int = 0
    ) -> list[list[int]]:
        """The ids of a text about each image, without its end, which is also what every text begins
        with.

        Args:
            images_BCHW: float ``[B, C, H, W]``.
            end: id of the end of a text.
            temperature: divides the logits; 0 takes the likeliest character (the first of equals).
            seed: of the draws.
        """
        generator = torch.Generator().manual_seed(seed)
        cache = self.new_cache(images_BCHW)
        last_B = torch.full((len(images_BCHW),), end, dtype=torch.int64)
        written: list[list[int]] = [[] for _ in images_BCHW]
        going = [True] * len(written)
        for _ in range(self.options.max_length):
            logits_BV = (
                self(last_B[:, None].to(images_BCHW.device), cache=cache)[:, -1].double().cpu()
            )
            if temperature == 0:
                last_B = logits_BV.argmax(dim=-1)
            else:
                shares_BV = (logits_BV / temperature).softmax(dim=-1)
                last_B = torch.multinomial(shares_BV, 1, generator=generator)[:, 0]
            for row, token in enumerate(last_B.tolist()):
                going[row] = going[row] and token != end
                if going[row]:
                    written[row].append(token)
            if not any(going):
                break
        return written

    def _positions(self, x_BSD: Tensor, cache: KeyValueCache | None) -> Positions:
        config = self.config
        (batch, length, _) = x_BSD.shape
        device = x_BSD.device
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


def build(config: CaptionerConfig, vocabulary_size: int) -> Captioner:
    """The factory that the ``captioner`` model registers."""
    return Captioner(config, vocabulary_size)
