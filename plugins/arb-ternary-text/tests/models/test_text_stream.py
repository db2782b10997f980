"""Drawn tokens become text while they are drawn, and end at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import pairwise

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.errors import UsageProblem
from arb_ternary_text.data.tokenizers import (
    ByteTokenizer,
    CharacterTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from arb_ternary_text.models.generate import streamed_text, text_until


@given(st.text(max_size=40), st.text(max_size=8), st.booleans())
def test_streamed_pieces_are_the_decoded_text(text: str, prompt: str, bytewise: bool) -> None:
    tokenizer: Tokenizer = ByteTokenizer()
    if not bytewise:
        tokenizer = CharacterTokenizer.from_text(f"x{prompt}{text}")
    before = tokenizer.encode(f"x{prompt}")
    ids = tokenizer.encode(text)
    assert "".join(streamed_text(tokenizer, before, iter(ids))) == text


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_streamed_pieces_of_sentencepiece_are_the_decoded_text(model_type: str) -> None:
    written = BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(["the cat sat on the mat"] * 20),
        model_writer=written,
        vocab_size=300 if model_type == "bpe" else 280,
        model_type=model_type,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = SentencePieceTokenizer.from_bytes(written.getvalue())
    text = "the  cat sat é→ on \n the mat, the cat sat"
    ids = tokenizer.encode(text)
    for cut in range(1, len(ids)):
        pieces = streamed_text(tokenizer, ids[:cut], iter(ids[cut:]))
        before = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
        assert before + "".join(pieces) == tokenizer.decode(ids)


def test_a_long_text_is_not_decoded_again_for_each_token() -> None:
    lengths: list[int] = []

    class Counting(ByteTokenizer):
        def decode(self, ids: Sequence[int]) -> str:
            lengths.append(len(ids))
            return super().decode(ids)

    tokenizer = Counting()
    assert len("".join(streamed_text(tokenizer, [65] * 1000, iter([66] * 1000)))) == 1000
    assert max(lengths) < 20


@given(
    st.text("ab\n", max_size=20),
    st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(0, 20), max_size=5),
)
def test_text_ends_at_the_first_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    ends = [text.find(stop) for stop in stops if stop in text]
    expected = text[: min(ends)] if ends else text
    assert "".join(text_until(pieces, stops)) == expected


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageProblem, match="must not be empty"):
        text_until(["a"], ["a", ""])
