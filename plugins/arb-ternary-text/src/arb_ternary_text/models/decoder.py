"""A decoder-only transformer whose parts are ternary unless the config says otherwise.

Shapes: ``B`` sequences, ``S`` positions, ``D`` width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from arb_ternary.errors import UsageProblem
from arb_ternary_text.models.attention import Positions, make_positions
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.cache import KeyValueCache
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.parts import make_embedding, make_head, make_norm

__all__ = ["Decoder", "DecoderConfig", "build"]


class Decoder(nn.Module):
    """Embedding, blocks, final norm, head.

    ``forward`` is ``logits(run_blocks(embed(tokens)))``; the three are public for those who grow, cut or distil a
    model.

    Args:
        config: the options.
        vocabulary_size: number of token ids.
        blocks: what yields the blocks in the order in which they run; None makes ``config.layers`` new ones.
    """

    def __init__(self, config: DecoderConfig, vocabulary_size: int, *, blocks: nn.ModuleList | None = None) -> None:
        super().__init__()
        if vocabulary_size < 1:
            raise UsageProblem(f"vocabulary_size: must be at least 1, not {vocabulary_size}")
        self.config = config
        self.vocabulary_size = vocabulary_size
        self.embedding = make_embedding(config, vocabulary_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers)) if blocks is None else blocks
        self.final_norm = make_norm(config, config.width, gain=True)
        self.head = make_head(config, vocabulary_size, self.embedding)
        self._logit_scale = 2.0**config.logit_scale
        self._dtype: torch.dtype | None = None
        self._checkpoint_from: int | None = None
        self._preserves_state = False
        self._runtime_cache: KeyValueCache | None = None

    @property
    def max_length(self) -> int:
        """Context: the longest sequence of a model without a sliding window."""
        return self.config.max_length

    @property
    def sliding_window(self) -> int | None:
        """Positions that a position sees, itself included; None = all."""
        return self.config.sliding_window

    def forward(self, tokens_BS: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Logits ``[B, S, V]`` of the token that follows each position.

        Args:
            tokens_BS: token ids, int64 (or int32).
            cache: what earlier calls have seen; ``tokens_BS`` continue it, and it is advanced.

        Raises:
            UsageProblem: the sequence exceeds the context, or the cache does not fit the batch.
        """
        streamed = self._runtime(tokens_BS.size(0)) if cache is None and self.training else cache
        return self.logits(self._run(self.embed(tokens_BS), self.blocks, streamed))

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """The residual stream before the first block, ``[B, S, D]``."""
        x_BSD: Tensor = self.embedding(tokens_BS)
        return x_BSD if self._dtype is None else x_BSD.to(self._dtype)

    def run_blocks(self, x_BSD: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """The residual stream after blocks ``first`` to ``last`` (exclusive; None = to the end), of whole sequences."""
        return self._run(x_BSD, self.blocks[first:last], None)

    def logits(self, x_BSD: Tensor) -> Tensor:
        """Final norm and head: ``[B, S, V]``."""
        logits_BSV: Tensor = self.head(self.final_norm(x_BSD))
        return logits_BSV if self._logit_scale == 1.0 else logits_BSV * self._logit_scale

    def new_cache(self, batch_size: int) -> KeyValueCache:
        """An empty cache for ``batch_size`` sequences. With a sliding window it takes any number of tokens.

        Raises:
            UsageProblem: the model is not causal.
        """
        if not self.config.causal:
            raise UsageProblem(
                "cache: the model is not causal, so that a new token changes what earlier ones see",
                "Run whole sequences without a cache, or train a model with `causal: true`.",
            )
        window = self.config.sliding_window
        limit = self.config.max_length if window is None else None
        return KeyValueCache(len(self.blocks), batch_size, window=window, limit=limit)

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Compute in ``dtype``: float parameters, and the activations between ternary modules."""
        self.to(dtype)
        self._dtype = dtype

    def set_activation_checkpointing(self, enabled: bool, threshold: int | None = None) -> None:
        """Keep only each block's input in training and recompute the rest in the backward.

        Args:
            enabled: False keeps every activation.
            threshold: fewest tokens in a batch (``B * S``) for which it is done; None = always.

        Raises:
            UsageProblem: the threshold is negative.
        """
        if threshold is not None and threshold < 0:
            raise UsageProblem(f"activation checkpointing: the threshold must be at least 0, not {threshold}")
        self._checkpoint_from = (threshold or 0) if enabled else None

    def set_state_preservation(self, enabled: bool) -> None:
        """Let a training batch continue the one before, row by row, for streamed text.

        Calls without a cache in training mode then see the positions before them, without a gradient to them, as far
        back as the sliding window reaches, or ``max_length`` where there is none. Evaluation does not touch that
        state.

        Raises:
            UsageProblem: the model is not causal.
        """
        if enabled:
            self.new_cache(1)
        self._preserves_state = enabled
        self._runtime_cache = None

    def reset_runtime_state(self) -> None:
        """Forget the batches seen so far: the next one starts afresh."""
        self._runtime_cache = None

    def runtime_state(self) -> dict[str, Any] | None:
        """What the next training batch continues, as nested lists of tensors for a checkpoint; None when nothing."""
        cache = self._runtime_cache
        return None if cache is None else {"batch_size": cache.batch_size, **cache.state_dict()}

    def load_runtime_state(self, state: Mapping[str, Any] | None) -> None:
        """Continue from :meth:`runtime_state`."""
        self._runtime_cache = None
        if state is not None:
            self._runtime_cache = self._streaming_cache(int(state["batch_size"]))
            self._runtime_cache.load_state_dict(state)

    def _runtime(self, batch_size: int) -> KeyValueCache | None:
        if not self._preserves_state:
            return None
        if self._runtime_cache is None:
            self._runtime_cache = self._streaming_cache(batch_size)
        return self._runtime_cache

    def _streaming_cache(self, batch_size: int) -> KeyValueCache:
        window = self.config.sliding_window or self.config.max_length
        return KeyValueCache(len(self.blocks), batch_size, window=window, limit=None)

    def _run(self, x_BSD: Tensor, blocks: Iterable[nn.Module], cache: KeyValueCache | None) -> Tensor:
        batch, length, _ = x_BSD.shape
        positions = self._positions(x_BSD, cache)
        recomputes = self._recomputes(batch * length)
        for number, block in enumerate(blocks):
            layer_cache = None if cache is None else cache.layers[number]
            if recomputes:
                # No randomness inside a block: votes are cast in the backward alone.
                x_BSD = checkpoint(block, x_BSD, positions, layer_cache, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BSD = block(x_BSD, positions, layer_cache)
        if cache is not None:
            cache.advance(length)
        return x_BSD

    def _recomputes(self, tokens: int) -> bool:
        if self._checkpoint_from is None or tokens < self._checkpoint_from:
            return False
        return self.training and torch.is_grad_enabled()

    def _positions(self, x_BSD: Tensor, cache: KeyValueCache | None) -> Positions:
        config = self.config
        batch, length, _ = x_BSD.shape
        if cache is None:
            start, span, total, window = 0, None, length, config.sliding_window
            if window is None and length > config.max_length:
                raise UsageProblem(
                    f"tokens: a sequence of {length} exceeds the context of {config.max_length}",
                    "Give fewer tokens, or train the model with a larger max_length.",
                )
        else:
            start, span, window = cache.length, cache.reserve(batch, length), cache.window
            total = span.past + length
        return make_positions(config, x_BSD, start=start, total=total, window=window, span=span)


def build(config: DecoderConfig, vocabulary_size: int) -> Decoder:
    """The factory that the ``decoder`` model registers."""
    return Decoder(config, vocabulary_size)
