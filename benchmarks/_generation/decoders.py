"""Our decoder with random weights, ternary on a backend or bfloat16 in torch."""

from __future__ import annotations

import copy

import numpy as np
import torch
from attrs import evolve
from numpy.typing import NDArray
from torch import Tensor

from _generation.shapes import GenerationShape
from arb_ternary.backends.dispatch import kernel
from arb_ternary.backends.select import use_backend
from arb_ternary.ternary.huge_pages import move_to_huge_pages
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_text.models.cache import CacheNumbers, KeyValueCache
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.build import undrawn, without_accumulators


class DecoderSession:
    """A decoder that reads tokens and takes the likeliest next ones.

    Args:
        model: the decoder.
        numbers: the format in which it keeps keys and values.
    """

    def __init__(self, model: Decoder, numbers: CacheNumbers) -> None:
        self._model = model.eval()
        self._numbers: CacheNumbers = numbers

    def start(self, batch: int, length: int) -> None:  # the cache grows as it is filled
        """Make an empty cache for ``batch`` sequences of up to ``length`` tokens."""
        self.cache: KeyValueCache = self._model.new_cache(batch, self._numbers)

    @torch.no_grad()
    def read(self, tokens_BS: NDArray[np.int64]) -> NDArray[np.int64]:
        """Read tokens of every sequence and return the likeliest next token of each, ``[B]``."""
        logits_BV: Tensor = self._model.next_logits(torch.from_numpy(tokens_BS), self.cache)
        likeliest: NDArray[np.int64] = logits_BV.argmax(dim=-1).numpy()
        return likeliest


def ternary_decoder(shape: GenerationShape, max_length: int, backend: str) -> Decoder:
    """Make a decoder of random trits without accumulators, as `arb generate` loads a model.

    Blocks are copies of one, since no kernel looks at their values.
    """
    generator = torch.Generator().manual_seed(0)
    config = shape.config(max_length)
    with undrawn(), without_accumulators(), use_backend(backend):
        model = Decoder(evolve(config, layers=1), shape.vocabulary)
    for _, module in ternary_modules(model):
        _draw_trits_(module, generator)
    deep = _deep(model, config.layers)
    move_to_huge_pages(deep)
    return deep


def _draw_trits_(module: TernaryModule, generator: torch.Generator) -> None:
    """Replace the packed weight by a uniformly random one; only this matrix is ever int8."""
    size = (module.shape.out_features, module.shape.in_features)
    trits = torch.empty(size, dtype=torch.int8).random_(-1, 2, generator=generator)
    module.weight.copy_(kernel(module.backend, "pack")(trits))


def bfloat16_decoder(shape: GenerationShape, max_length: int) -> Decoder:
    """Make a decoder with every weight and activation in bfloat16; blocks are copies of one."""
    torch.manual_seed(0)
    config = shape.config(max_length, floats=True)
    return _deep(
        Decoder(evolve(config, layers=1), shape.vocabulary).to(torch.bfloat16), config.layers
    )


def _deep(model: Decoder, layers: int) -> Decoder:
    """Give ``model`` as many copies of its one block as make ``layers``."""
    for _ in range(1, layers):
        model.blocks.append(copy.deepcopy(model.blocks[0]))
    model.config = evolve(model.config, layers=layers)
    return model
