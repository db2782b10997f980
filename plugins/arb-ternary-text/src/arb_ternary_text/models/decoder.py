"""A decoder-only transformer whose parts are ternary unless the config says otherwise.

Shapes: ``B`` sequences, ``S`` positions, ``D`` width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.embedding import TernaryEmbedding
from arb_ternary_text.models.attention import Positions, make_positions
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.block_kernels import is_watched
from arb_ternary_text.models.cache import CacheNumbers, KeyValueCache
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.native_decode import decode_token
from arb_ternary_text.models.parts import make_embedding, make_head, make_norm
from arb_ternary_text.models.transformer import Transformer


class Decoder(Transformer):
    """Embedding, blocks, final norm, head.

    ``forward`` is ``logits(run_blocks(embed(tokens)))``; the three are public for those who grow,
    cut or distil a model.

    Args:
        config: the options.
        vocabulary_size: number of token ids.
        blocks: what yields the blocks in the order in which they run; None makes ``config.layers``
            new ones.
    """

    embedding: nn.Embedding | TernaryEmbedding

    def __init__(
        self, config: DecoderConfig, vocabulary_size: int, *, blocks: nn.ModuleList | None = None
    ) -> None:
        super().__init__(config, vocabulary_size)
        self.embedding = make_embedding(config, vocabulary_size)
        self.blocks = (
            nn.ModuleList(Block(config) for _ in range(config.layers)) if blocks is None else blocks
        )
        self.final_norm = make_norm(config, config.width, gain=True)
        self.head = make_head(config, vocabulary_size, self.embedding)
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

    @property
    def cache_numbers(self) -> tuple[CacheNumbers, ...]:
        """What :meth:`new_cache` may keep keys and values as."""
        return get_args(CacheNumbers)

    def forward(self, tokens_BS: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Logits ``[B, S, V]`` of the token that follows each position.

        Args:
            tokens_BS: token ids, int64 (or int32).
            cache: what earlier calls have seen; ``tokens_BS`` continue it, and it is advanced.

        Raises:
            UsageProblem: the sequence exceeds the context, or the cache does not fit the batch.
        """
        if (
            type(self) is Decoder
            and cache is not None
            and tokens_BS.size(1) == 1
            and not torch.is_grad_enabled()
        ):
            logits_B1V = decode_token(self, tokens_BS, cache)
            if logits_B1V is not None:
                return logits_B1V
        return self.logits(self.hidden(tokens_BS, cache))

    def hidden(self, tokens_BS: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """The residual stream ``[B, S, D]`` after the last block; arguments and errors are those of
        :meth:`forward`.
        """
        streamed = self._runtime(tokens_BS.size(0)) if cache is None and self.training else cache
        return self._run(self.embed(tokens_BS), self.blocks, streamed)

    def next_logits(self, tokens_BS: Tensor, cache: KeyValueCache) -> Tensor:
        """Logits ``[B, V]`` of the token after the last position; the head multiplies no other.

        Where somebody watches the model, or has given it a ``forward`` of its own, all are
        computed, of which these are the last.
        """
        if tokens_BS.size(1) == 1 or type(self).forward is not Decoder.forward or is_watched(self):
            logits_BSV: Tensor = self(tokens_BS, cache)
            return logits_BSV[:, -1]
        return self.logits(self.hidden(tokens_BS, cache)[:, -1:])[:, -1]

    def new_cache(self, batch_size: int, numbers: CacheNumbers = "float") -> KeyValueCache:
        """An empty cache for ``batch_size`` sequences. With a sliding window it takes any number of
        tokens.

        Keys and values are kept in the dtype of the model, or, for passes without gradients, as
        ``int8``: see :class:`~arb_ternary_text.models.cache.Int8LayerCache`.

        Raises:
            UsageProblem: the model is not causal, or no such numbers.
        """
        if not self.config.causal:
            raise UsageProblem(
                "cache: the model is not causal, so that a new token changes what earlier ones see",
                "Run whole sequences without a cache, or train a model with `causal: true`.",
            )
        window = self.config.sliding_window
        limit = self.config.max_length if window is None else None
        return KeyValueCache(
            len(self.blocks), batch_size, window=window, limit=limit, numbers=numbers
        )

    def set_state_preservation(self, enabled: bool) -> None:
        """Let a training batch continue the one before, row by row, for streamed text.

        Calls without a cache in training mode then see the positions before them, without a
        gradient to them, as far back as the sliding window reaches, or ``max_length`` where there
        is none. Evaluation does not touch that state.

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
        """What the next training batch continues, as nested lists of tensors for a checkpoint; None
        when nothing.
        """
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

    def _positions(self, x_BSD: Tensor, cache: KeyValueCache | None) -> Positions:
        config = self.config
        batch, length, _ = x_BSD.shape
        if cache is None:
            start = 0
            span = None
            total = length
            window = config.sliding_window
            if window is None and length > config.max_length:
                raise UsageProblem(
                    f"tokens: a sequence of {length} exceeds the context of {config.max_length}",
                    "Give fewer tokens, or train the model with a larger max_length.",
                )
        else:
            start = cache.length
            span = cache.reserve(batch, length)
            window = cache.window
            total = span.past + length
        return make_positions(config, x_BSD, start=start, total=total, window=window, span=span)


def build(config: DecoderConfig, vocabulary_size: int) -> Decoder:
    """The factory that the ``decoder`` model registers."""
    return Decoder(config, vocabulary_size)
