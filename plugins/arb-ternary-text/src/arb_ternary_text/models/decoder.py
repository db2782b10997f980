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
from arb_ternary_text.models.native_decode import decode_tokens
from arb_ternary_text.models.parts import make_embedding, make_head, make_norm
from arb_ternary_text.models.transformer import Transformer


class Decoder(Transformer):
    """A language model: embedding, blocks, final norm, head.

    Args:
        config: the options.
        vocabulary_size: number of token ids.
        blocks: yields the blocks in the order in which they run; None makes ``config.layers`` new
            ones.
    """

    embedding: nn.Embedding | TernaryEmbedding

    def __init__(
        self, config: DecoderConfig, vocabulary_size: int, *, blocks: nn.ModuleList | None = None
    ) -> None:
        super().__init__(config, vocabulary_size)
        self.embedding = make_embedding(config, vocabulary_size)
        if blocks is None:
            blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.blocks = blocks
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
        """Number of positions that a position sees, itself included; None = all."""
        return self.config.sliding_window

    @property
    def cache_numbers(self) -> tuple[CacheNumbers, ...]:
        """The formats of keys and values that :meth:`new_cache` can make."""
        return get_args(CacheNumbers)

    def forward(self, tokens_BS: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return logits ``[B, S, V]`` of the token that follows each position.

        Args:
            tokens_BS: token ids, int64 (or int32).
            cache: keys and values of the tokens before, which ``tokens_BS`` continue. It is
                advanced.

        Raises:
            UsageProblem: the sequence exceeds the context, or the cache does not fit the batch.
        """
        single = tokens_BS.size(1) == 1
        if cache is not None and single and type(self) is Decoder and not torch.is_grad_enabled():
            logits_BV = decode_tokens(self, tokens_BS, cache)
            if logits_BV is not None:
                return logits_BV.unsqueeze(1)
        return self.logits(self.hidden(tokens_BS, cache))

    def hidden(self, tokens_BS: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return the residual stream ``[B, S, D]`` after the last block.

        Arguments and errors are those of :meth:`forward`.
        """
        if cache is None and self.training:
            cache = self._runtime(tokens_BS.size(0))
        return self._run(self.embed(tokens_BS), self.blocks, cache)

    def next_logits(self, tokens_BS: Tensor, cache: KeyValueCache) -> Tensor:
        """Return logits ``[B, V]`` of the token after the last position.

        The head multiplies that position only, and a kernel of the backend reads all of them if it
        has one. If somebody watches the model, or has given it a ``forward`` of its own, the logits
        of all positions are computed.
        """
        if tokens_BS.size(1) == 1 or type(self).forward is not Decoder.forward or is_watched(self):
            logits_BSV: Tensor = self(tokens_BS, cache)
            return logits_BSV[:, -1]
        if type(self) is Decoder and not torch.is_grad_enabled():
            logits_BV = decode_tokens(self, tokens_BS, cache)
            if logits_BV is not None:
                return logits_BV
        return self.logits(self.hidden(tokens_BS, cache)[:, -1:])[:, -1]

    def new_cache(self, batch_size: int, numbers: CacheNumbers = "float") -> KeyValueCache:
        """Make an empty cache for ``batch_size`` sequences.

        With a sliding window it takes any number of tokens. Keys and values are kept in the dtype
        of the model, in 16 bits (:class:`~arb_ternary_text.models.cache.Bfloat16LayerCache`), or,
        for passes without gradients, as ``int8``
        (:class:`~arb_ternary_text.models.cache.Int8LayerCache`).

        Raises:
            UsageProblem: the model is not causal, or there is no such format.
        """
        if not self.config.causal:
            raise UsageProblem(
                "cache: the model is not causal, so a new token changes what earlier tokens see",
                "Run whole sequences without a cache, or train a model with `causal: true`.",
            )
        window = self.config.sliding_window
        limit = self.config.max_length if window is None else None
        return KeyValueCache(
            len(self.blocks), batch_size, window=window, limit=limit, numbers=numbers
        )

    def set_state_preservation(self, enabled: bool) -> None:
        """Let each row of a training batch continue that row of the batch before.

        For streamed text. Calls without a cache in training mode then see earlier positions,
        without a gradient to them, as far back as the sliding window, or ``max_length`` without
        one. Evaluation does not touch this state.

        Raises:
            UsageProblem: the model is not causal.
        """
        if enabled:
            self.new_cache(1)
        self._preserves_state = enabled
        self._runtime_cache = None

    def reset_runtime_state(self) -> None:
        """Forget the batches seen so far, so that the next one starts new sequences."""
        self._runtime_cache = None

    def runtime_state(self) -> dict[str, Any] | None:
        """Return the state that the next training batch continues, for a checkpoint.

        It consists of nested lists of tensors; None if there is no state.
        """
        cache = self._runtime_cache
        if cache is None:
            return None
        return {"batch_size": cache.batch_size, **cache.state_dict()}

    def load_runtime_state(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state that :meth:`runtime_state` returned."""
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
