"""Log-likelihoods of tokens behind others, with keys and values of common beginnings kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from arb_ternary_text.models.generate import CachedModel, CachedReader

#: Most positions whose logits are in memory at once.
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
        self._max_length = model.max_length
        self._reader = CachedReader(model, device)

    def score(self, context: Sequence[int], continuation: Sequence[int]) -> Score:
        """Score ``continuation``, at least one id, behind ``context``.

        Of a longer context only what fits into the model's context is read. The context has at
        least one id, and the continuation has at most as many as the model reads.
        """
        # The last id is predicted, and predicts nothing.
        ids = [*context, *continuation][-self._max_length - 1 : -1]
        # The last id of the context predicts the first of the continuation.
        first = len(ids) - len(continuation)
        held = self._reader.keep(ids[:first])
        if held < first:
            self._reader.read(ids[held:first])

        total = 0.0
        greedy = True
        for start in range(0, len(continuation), _PIECE):
            targets = continuation[start : start + _PIECE]
            begin = first + start
            logits_SV = self._reader.logits(ids[begin : begin + len(targets)])
            logprobs_SV = logits_SV.float().log_softmax(dim=-1)
            targets_S = torch.tensor(targets, device=logprobs_SV.device)
            chosen_S = logprobs_SV.gather(dim=-1, index=targets_S.unsqueeze(-1))
            total += float(chosen_S.double().sum())
            is_likeliest_S = logprobs_SV.argmax(dim=-1) == targets_S
            greedy = greedy and bool(is_likeliest_S.all())
        return Score(total, greedy)
