"""Blocks between an embedding and a head: the base of models of text, images and sounds.

Shapes: ``B`` samples, ``S`` positions, ``D`` width, ``V`` ids or classes, ``M`` predictions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem
from arb_ternary_text.models import native_block
from arb_ternary_text.models.attention import Positions
from arb_ternary_text.models.block_kernels import is_watched, kernels_for, may_round_differently
from arb_ternary_text.models.block_model import BlockModel
from arb_ternary_text.models.blocked_loss import (
    MANY_LOGITS,
    Guide,
    cross_entropies,
    mean_cross_entropy,
    serves,
)
from arb_ternary_text.models.cache import KeyValueCache
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.trit_vector import vectors_together


def _definer(kind: type, name: str) -> type:
    """Return the class from which ``kind`` inherits the method ``name``."""
    return next(each for each in kind.__mro__ if name in vars(each))


class Transformer(BlockModel):
    """``forward`` is ``logits(run_blocks(embed(inputs)))``.

    The three methods are public for code that grows, cuts or distils a model. A subclass makes the
    four modules below in this order, which is the order in which their weights are drawn, and
    overrides :meth:`_positions`.

    Attributes:
        grows: class attribute: whether the model computes nothing but ``blocks`` between its
            embedding and its head, so that blocks can be added.
        config: the options of the blocks.
        vocabulary_size: ``V``.
        embedding: the first module, from inputs to the residual stream.
        blocks: yields the blocks in the order in which they run.
        final_norm: the norm in front of the head.
        head: the last module, from width to ``V``.

    Raises:
        UsageProblem: ``vocabulary_size`` is less than 1.
    """

    grows: ClassVar[bool] = True

    embedding: nn.Module
    blocks: nn.ModuleList
    final_norm: nn.Module
    head: nn.Module

    def __init__(self, config: DecoderConfig, vocabulary_size: int) -> None:
        super().__init__()
        if vocabulary_size < 1:
            raise UsageProblem(f"vocabulary_size: must be at least 1, not {vocabulary_size}")
        self.config = config
        self.vocabulary_size = vocabulary_size
        self._logit_scale = 2.0**config.logit_scale

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits, ``[..., V]``."""
        return self.logits(self.hidden(inputs))

    def hidden(self, inputs: Tensor) -> Tensor:
        """Return the residual stream after the last block, ``[..., D]``.

        :meth:`logits` of it is what ``forward`` returns.
        """
        return self._run(self.embed(inputs), self.blocks, None)

    def embed(self, inputs: Tensor) -> Tensor:
        """Return the residual stream before the first block, ``[B, S, D]``."""
        x_BSD: Tensor = self.embedding(inputs)
        return x_BSD if self._dtype is None else x_BSD.to(self._dtype)

    def run_blocks(self, x_BSD: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Run blocks ``first`` to ``last`` (exclusive; None = to the end) on whole sequences."""
        return self._run(x_BSD, self.blocks[first:last], None)

    def logits(self, x_BSD: Tensor) -> Tensor:
        """Apply final norm and head: ``[..., D]`` to ``[..., V]``."""
        with vectors_together(self.final_norm, self.head):
            kernels = kernels_for(x_BSD, (self.final_norm,), (self.head,))
            if kernels is None:
                logits_BSV: Tensor = self.head(self.final_norm(x_BSD))
            else:
                logits_MV = native_block.normalized_product(
                    kernels, x_BSD.flatten(0, -2), self.final_norm, self.head
                )
                logits_BSV = logits_MV.view(*x_BSD.shape[:-1], -1)
        return logits_BSV if self._logit_scale == 1.0 else logits_BSV * self._logit_scale

    def computes_loss_in_blocks(self, predictions: int) -> bool:
        """Return whether to call :meth:`mean_cross_entropy` because the logits would be too many.

        Not if somebody has replaced ``forward``, ``logits`` or the head, or watches the model; nor
        in an exact run, whose results are rounded as those of whole logits.
        """
        if predictions * self.vocabulary_size < MANY_LOGITS or self._dtype is torch.float16:
            return False
        if not may_round_differently() or is_watched(self):
            return False
        kind = type(self)
        if kind.logits is not Transformer.logits:
            return False
        if _definer(kind, "forward") is not _definer(kind, "hidden"):
            return False
        return serves(self.head)

    def mean_cross_entropy(
        self, x_MD: Tensor, targets_M: Tensor, guide: Guide | None = None
    ) -> Tensor:
        """Return the mean cross entropy of ``logits(x)``, float32, a few rows at a time.

        With a ``guide`` the mean divergence from its predictions is added.

        Raises:
            IndexError: a target is not an id.
        """
        return mean_cross_entropy(
            self.head, self.final_norm(x_MD), targets_M, self._logit_scale, guide
        )

    def cross_entropies(self, x_MD: Tensor, targets_M: Tensor) -> Tensor:
        """Return the cross entropy of each row, float32 ``[M]``, without gradients.

        Raises:
            IndexError: a target is not an id.
        """
        return cross_entropies(self.head, self.final_norm(x_MD), targets_M, self._logit_scale)

    def reset_runtime_state(self) -> None:
        """Forget the batches seen so far. Here it does nothing: no state is kept."""

    def _run(
        self, x_BSD: Tensor, blocks: Iterable[nn.Module], cache: KeyValueCache | None
    ) -> Tensor:
        return self._run_at(x_BSD, blocks, self._positions(x_BSD, cache), cache)

    def _run_at(
        self,
        x_BSD: Tensor,
        blocks: Iterable[nn.Module],
        positions: Positions,
        cache: KeyValueCache | None,
    ) -> Tensor:
        batch, length, _ = x_BSD.shape
        for number, block in enumerate(blocks):
            layer_cache = None if cache is None else cache.layers[number]
            x_BSD = self.run_block(block, batch * length, x_BSD, positions, layer_cache)
        if cache is not None:
            cache.advance(length)
        return x_BSD

    def _positions(self, x_BSD: Tensor, cache: KeyValueCache | None) -> Positions:
        """Return the positions of ``x_BSD``, which follow those of ``cache``."""
        raise NotImplementedError

    def _runtime(self, batch_size: int) -> KeyValueCache | None:
        """Return the cache that a training batch continues; None for none."""
        return None
