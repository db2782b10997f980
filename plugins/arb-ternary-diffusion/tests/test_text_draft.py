"""Texts with gaps, and how they are filled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from arb_ternary.errors import UsageProblem
from arb_ternary_diffusion.text_draft import Draft, fill_draft, parse_draft
from arb_ternary_diffusion.text_sampler import Filling
from arb_ternary_text.data.tokenizers import ByteTokenizer, CharacterTokenizer
from arb_ternary_text.models.generate import seeded_generator

BYTES = ByteTokenizer()
MASK = 255


def test_gap_character_is_a_hidden_token() -> None:
    draft = parse_draft("a__b_", BYTES, "_", MASK)
    assert draft.ids == (97, None, None, 98, None)
    assert draft.hidden == 3
    assert draft.text(BYTES, "#") == "a##b#"


def test_text_between_gaps_is_decoded_as_a_whole() -> None:
    draft = parse_draft("é_", BYTES, "_", MASK)
    assert draft.ids == (0xC3, 0xA9, None)
    assert draft.text(BYTES, "_") == "é_"


def test_no_gap_character_means_no_gaps() -> None:
    assert parse_draft("a_b", BYTES, "", MASK).hidden == 0
    assert parse_draft("", BYTES, "_", MASK).ids == ()


def test_parse_refuses_long_gaps_and_the_mask() -> None:
    with pytest.raises(UsageProblem, match="gap: must be one character, not '__'"):
        parse_draft("a", BYTES, "__", MASK)
    with pytest.raises(
        UsageProblem, match="prompt: its token 2 is the id 1, which stands for hidden tokens"
    ):
        parse_draft("_cb", CharacterTokenizer("abc"), "_", 1)


def counting(limit: int) -> Callable[[Tensor], Tensor]:
    """Return a model that predicts ``position % 100`` and takes at most ``limit`` tokens."""

    def predict(tokens: Tensor) -> Tensor:
        assert tokens.shape[1] <= limit
        logits = torch.full((1, tokens.shape[1], 256), -50.0)
        logits[0, torch.arange(tokens.shape[1]), torch.arange(tokens.shape[1]) % 100] = 50.0
        return logits

    return predict


def filled(draft: Draft, new_tokens: int, context: int) -> list[Draft]:
    return list(
        fill_draft(
            Filling(steps=3),
            counting(context),
            draft,
            new_tokens=new_tokens,
            context=context,
            mask_token=MASK,
            generator=seeded_generator(0),
        )
    )


def test_draft_within_the_context_is_one_piece() -> None:
    states = filled(Draft((200, None, 201)), 3, 8)
    assert states[-1].ids == (200, 1, 201, 3, 4, 5)
    assert all(len(state.ids) == 6 and state.ids[0] == 200 for state in states)
    assert [state.hidden for state in states] == sorted(
        (state.hidden for state in states), reverse=True
    )


def test_longer_text_is_drawn_in_pieces() -> None:
    states = filled(Draft((200, 201, 202)), 15, 8)
    # The first piece sees the prompt (positions 0 to 2 of its window) and draws 5 tokens. The
    # others see 4 and draw 4.
    assert states[-1].ids == (200, 201, 202, 3, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5)
    assert all(len(state.ids) == 18 for state in states)


def test_long_prompt_is_seen_in_its_latest_half() -> None:
    assert filled(Draft(tuple(range(100, 120))), 2, 8)[-1].ids == (*range(100, 120), 4, 5)


def test_fill_refuses_what_it_cannot_draw() -> None:
    with pytest.raises(UsageProblem, match="it has no gaps, and no tokens are to follow"):
        filled(Draft((1, 2)), 0, 8)
    with pytest.raises(UsageProblem, match="7 tokens and 2 new ones exceed the context of 8"):
        filled(Draft((1, None, 2, 3, 4, 5, 6)), 2, 8)
    with pytest.raises(UsageProblem, match="max_new_tokens: must be at least 0"):
        filled(Draft((1, None)), -1, 8)
