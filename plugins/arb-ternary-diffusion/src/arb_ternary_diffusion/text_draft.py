"""A text with gaps, and what becomes of it while they are filled."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from attrs import frozen

from arb_ternary.errors import UsageProblem
from arb_ternary_diffusion.text_sampler import Denoise, Filling
from arb_ternary_text.data.tokenizers import Tokenizer


@frozen
class Draft:
    """Token ids of which some are still to be drawn.

    Attributes:
        ids: the token ids; None = hidden.
    """

    ids: tuple[int | None, ...]

    @property
    def hidden(self) -> int:
        """How many tokens are hidden."""
        return sum(token is None for token in self.ids)

    def text(self, tokenizer: Tokenizer, gap: str) -> str:
        """The text, with ``gap`` for each hidden token."""
        runs = ([*run] for _, run in groupby(self.ids, key=lambda token: token is None))
        return "".join(
            gap * len(run)
            if run[0] is None
            else tokenizer.decode([token for token in run if token is not None])
            for run in runs
        )


def draft_of(prompt: str, tokenizer: Tokenizer, gap: str, mask_token: int) -> Draft:
    """``prompt`` with a hidden token for each character ``gap``; what stands between gaps is
    encoded for itself.

    Args:
        prompt: any text.
        tokenizer: of the model's data.
        gap: one character; empty = the prompt has no gaps.
        mask_token: the id that no text may have.

    Raises:
        UsageProblem: ``gap`` is longer than a character, or the prompt has the mask token.
        DataError: the tokenizer cannot write the prompt.
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
            f"Write {gap!r} for a token that is to be drawn." if gap else "Leave it out.",
        )
    return Draft(tuple(ids))


def fill_draft(
    filling: Filling,
    denoise: Denoise,
    draft: Draft,
    *,
    new_tokens: int,
    context: int,
    mask_token: int,
    generator: torch.Generator,
) -> Iterator[Draft]:
    """``draft`` after each step; the last one is without gaps and ``new_tokens`` tokens longer.

    Where draft and new tokens exceed the context, the new tokens are drawn in pieces: each sees the
    latest half of a context at most, and is filled in ``filling.steps`` steps like the first.

    Args:
        filling: how tokens are drawn.
        denoise: the model.
        draft: what is known, and gaps.
        new_tokens: how many tokens follow.
        context: the longest text that the model takes.
        mask_token: the id that stands for hidden tokens.
        generator: of all draws, on the host.

    Raises:
        UsageProblem: there is nothing to draw, or a draft with gaps exceeds the context.
    """
    if new_tokens < 0:
        raise UsageProblem(f"max_new_tokens: must be at least 0, not {new_tokens}")
    if not (new_tokens or draft.hidden):
        raise UsageProblem(
            "prompt: it has no gaps, and no tokens are to follow",
            "Give more --max-new-tokens, or write the gap character for each token that is to be "
            "drawn.",
        )
    if draft.hidden and len(draft.ids) + new_tokens > context:
        raise UsageProblem(
            f"prompt: {len(draft.ids)} tokens and {new_tokens} new ones exceed the {context} that "
            "the model sees, and gaps are filled by what stands on both sides",
            "Shorten the prompt or the gaps, or give fewer --max-new-tokens.",
        )
    return _filled(filling, denoise, list(draft.ids), new_tokens, context, mask_token, generator)


def _filled(
    filling: Filling,
    denoise: Denoise,
    ids: list[int | None],
    left: int,
    context: int,
    mask_token: int,
    generator: torch.Generator,
) -> Iterator[Draft]:
    while left or None in ids:
        fits = len(ids) + left <= context
        seen = len(ids) if fits else min(len(ids), max(1, context // 2))
        new = left if fits else min(left, context - seen)
        before = ids[: len(ids) - seen]
        window = [*ids[len(ids) - seen :], *[None] * new]
        tokens_1S = torch.tensor([[mask_token if token is None else token for token in window]])
        hidden_1S = torch.tensor([[token is None for token in window]])
        for tokens, hidden in filling.states(denoise, tokens_1S, hidden_1S, mask_token, generator):
            pairs = zip(tokens[0].tolist(), hidden[0].tolist(), strict=True)
            ids = [*before, *(None if is_hidden else token for token, is_hidden in pairs)]
            yield Draft((*ids, *[None] * (left - new)))
        left -= new
