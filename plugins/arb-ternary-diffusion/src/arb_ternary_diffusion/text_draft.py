"""A text with gaps, and how they are filled."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from attrs import frozen

from arb_ternary.errors import UsageProblem
from arb_ternary_diffusion.text_sampler import Filling, Predict
from arb_ternary_text.data.tokenizers import Tokenizer


@frozen
class Draft:
    """Token ids, some of which are hidden and still to be drawn.

    Attributes:
        ids: the token ids; None = hidden.
    """

    ids: tuple[int | None, ...]

    @property
    def hidden(self) -> int:
        """Number of hidden tokens."""
        return self.ids.count(None)

    def text(self, tokenizer: Tokenizer, gap: str) -> str:
        """Return the text, with ``gap`` for each hidden token."""
        pieces = []
        for is_hidden, run in groupby(self.ids, key=lambda token: token is None):
            ids = list(run)
            if is_hidden:
                pieces.append(gap * len(ids))
            else:
                pieces.append(tokenizer.decode([token for token in ids if token is not None]))
        return "".join(pieces)


def parse_draft(prompt: str, tokenizer: Tokenizer, gap: str, mask_token: int) -> Draft:
    """Return ``prompt`` as a draft, with a hidden token for each character ``gap``.

    The pieces between gaps are encoded separately.

    Args:
        prompt: any text.
        tokenizer: the tokenizer of the model's data.
        gap: one character; empty = the prompt has no gaps.
        mask_token: the id that no text may have.

    Raises:
        UsageProblem: ``gap`` is longer than one character, or the prompt has the mask token.
        DataError: the tokenizer cannot encode the prompt.
    """
    if len(gap) > 1:
        raise UsageProblem(
            f"gap: must be one character, not {gap!r}", "Each such character stands for one token."
        )
    ids: list[int | None] = []
    for is_gap, run in groupby(prompt, key=lambda character: character == gap):
        piece = "".join(run)
        ids += [None] * len(piece) if is_gap else tokenizer.encode(piece)
    if mask_token in ids:
        raise UsageProblem(
            f"prompt: its token {ids.index(mask_token)} is the id {mask_token}, which stands for "
            f"hidden tokens",
            f"Write {gap!r} for a token that is to be drawn." if gap else "Remove it.",
        )
    return Draft(tuple(ids))


def fill_draft(
    filling: Filling,
    predict: Predict,
    draft: Draft,
    *,
    new_tokens: int,
    context: int,
    mask_token: int,
    generator: torch.Generator,
) -> Iterator[Draft]:
    """Yield ``draft`` after each step; the last one has no gaps and ``new_tokens`` more tokens.

    If draft and new tokens exceed the context, the new tokens are drawn in pieces. Each piece sees
    at most the latest half of a context and is filled in ``filling.steps`` steps like the first.

    Args:
        filling: how tokens are drawn.
        predict: evaluates the model.
        draft: the known tokens, and gaps.
        new_tokens: number of tokens to draw after the draft.
        context: the longest text that the model takes.
        mask_token: the id that stands for hidden tokens.
        generator: source of all randomness, on the host.

    Raises:
        UsageProblem: there is nothing to draw, or a draft with gaps exceeds the context.
    """
    if new_tokens < 0:
        raise UsageProblem(f"max_new_tokens: must be at least 0, not {new_tokens}")
    if not (new_tokens or draft.hidden):
        raise UsageProblem(
            "prompt: it has no gaps, and no tokens are to follow",
            "Raise --max-new-tokens, or write the gap character for each token that is to be "
            "drawn.",
        )
    if draft.hidden and len(draft.ids) + new_tokens > context:
        raise UsageProblem(
            f"prompt: {len(draft.ids)} tokens and {new_tokens} new ones exceed the context of "
            f"{context}, and gaps are filled from both sides",
            "Shorten the prompt or the gaps, or lower --max-new-tokens.",
        )
    return _fill(filling, predict, list(draft.ids), new_tokens, context, mask_token, generator)


def _fill(
    filling: Filling,
    predict: Predict,
    ids: list[int | None],
    left: int,
    context: int,
    mask_token: int,
    generator: torch.Generator,
) -> Iterator[Draft]:
    while left or None in ids:
        seen = len(ids)
        new = left
        if len(ids) + left > context:
            seen = min(len(ids), max(1, context // 2))
            new = min(left, context - seen)
        before = ids[: len(ids) - seen]
        window: list[int | None] = ids[len(ids) - seen :] + [None] * new
        tokens_1S = torch.tensor([[mask_token if token is None else token for token in window]])
        hidden_1S = torch.tensor([[token is None for token in window]])
        left -= new
        for tokens, hidden in filling.states(predict, tokens_1S, hidden_1S, mask_token, generator):
            pairs = zip(tokens[0].tolist(), hidden[0].tolist(), strict=True)
            ids = before + [None if is_hidden else token for token, is_hidden in pairs]
            yield Draft(tuple(ids + [None] * left))
