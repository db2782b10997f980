"""Log-likelihoods of tokens behind others, with keys and values of common beginnings kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from arb_ternary_text.models.generate import CachedModel

#: Most positions of a forward pass. The logits of a pass are in memory at once.
_PIECE: Final = 256


class Score(NamedTuple):
    """How likely a continuation is.

    Attributes:
        log_likelihood: sum over its tokens, in nats.
        greedy: whether each token is the most likely one.
    """

    log_likelihood: float
    greedy: bool


class Scorer:
    """Scores continuations of one model, one after another.

    What a sequence has in common with the one before it is not read again, so that choices of a
    question, or questions behind the same examples, cost little if they follow each other.

    Args:
        model: a causal model.
        device: the device of the model.
    """

    def __init__(self, model: CachedModel, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._next_logits: Any = getattr(model, "next_logits", None)
        self._cache = model.new_cache(1)
        self._seen: list[int] = []

    @torch.no_grad()
    def score(self, context: Sequence[int], continuation: Sequence[int]) -> Score:
        """Score ``continuation``, at least one id, behind ``context``.

        Of a longer context only what fits into the model's context is read. The context has at
        least one id, and the continuation has at most as many as the model reads.
        """
        read = [*context, *continuation][-self._model.max_length - 1 : -1]
        counted = len(continuation)
        self._rewind(read, len(read) - counted)
        self._skip(read[len(self._seen) : len(read) - counted])
        total = 0.0
        greedy = True
        for start in range(0, counted, _PIECE):
            ids = read[len(self._seen) : len(self._seen) + min(_PIECE, counted - start)]
            logits_SV = self._forward(ids)
            targets_S = torch.as_tensor(continuation[start : start + len(ids)]).to(self._device)
            chosen_S = logits_SV.log_softmax(-1).gather(-1, targets_S[:, None])
            total += float(chosen_S.double().sum())
            greedy = greedy and bool((logits_SV.argmax(-1) == targets_S).all())
        return Score(total, greedy)

    def _rewind(self, ids: Sequence[int], most: int) -> None:
        """Forget what was read behind the beginning that it shares with ``ids[:most]``."""
        shared = 0
        for ours, seen in zip(ids[:most], self._seen, strict=False):
            if ours != seen:
                break
            shared += 1
        if shared == len(self._seen):
            return
        # A cache with a sliding window has dropped what would be needed again.
        if shared and self._model.sliding_window is None:
            self._cache.rewind(shared)
            del self._seen[shared:]
        else:
            self._cache = self._model.new_cache(1)
            self._seen = []

    def _skip(self, ids: Sequence[int]) -> None:
        """Read ids whose logits nobody needs."""
        for start in range(0, len(ids), _PIECE):
            self._forward(ids[start : start + _PIECE], last=True)

    def _forward(self, ids: Sequence[int], *, last: bool = False) -> Tensor:
        """Read ids; return the float32 logits ``[S, V]`` behind each, or with ``last`` of one."""
        tokens_1S = torch.tensor([ids], dtype=torch.int64, device=self._device)
        self._seen += ids
        if last and self._next_logits is not None:
            logits: Tensor = self._next_logits(tokens_1S, self._cache)
            return logits.float()
        return self._model(tokens_1S, self._cache)[0].float()
