"""Special tokens travel with a tokenizer, and typed letters are none of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from arb_ternary.errors import DataError
from arb_ternary_text.data.byte_level import BYTE_CHARACTERS
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.special_tokens import SpecialTokens
from arb_ternary_text.data.tokenizers import (
    ByteTokenizer,
    LanguageTokenizer,
    base_tokenizer,
    encode_letters,
    from_json,
    load_tokenizer,
    padded_to,
    special_tokens,
    token_text,
)

SPECIAL = SpecialTokens(
    bos=256, eos=(257, 256), pad=256, adds_bos=True, chat_template="{{ messages }}"
)


def chat_tokenizer() -> LanguageTokenizer:
    """Return a tokenizer of bytes with two control tokens, 256 and 257."""
    library = Tokenizer(models.BPE({c: i for i, c in enumerate(BYTE_CHARACTERS)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(
        [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
    )
    return LanguageTokenizer(FileTokenizer(library.to_str()), SPECIAL)


def test_special_tokens_survive_json_and_files(tmp_path: Any) -> None:
    state = json.loads(json.dumps(chat_tokenizer().to_json()))
    assert special_tokens(from_json(state)) == SPECIAL
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(state))
    assert load_tokenizer(path).to_json() == state


def test_padding_keeps_special_tokens() -> None:
    padded = from_json(padded_to(chat_tokenizer().to_json(), 300))
    assert padded.vocabulary_size == 300
    assert special_tokens(padded) == SPECIAL
    assert isinstance(base_tokenizer(padded), FileTokenizer)
    assert padded_to(padded.to_json(), 300) == padded.to_json()


def test_letters_that_spell_a_control_token_are_letters() -> None:
    tokenizer = chat_tokenizer()
    text = "a<|im_end|>b"
    assert tokenizer.encode(text) == [97, 257, 98]
    assert encode_letters(tokenizer, text) == list(text.encode())
    assert encode_letters(from_json(padded_to(tokenizer.to_json(), 300)), text) == list(
        text.encode()
    )


def test_control_tokens_have_a_spelling() -> None:
    tokenizer = chat_tokenizer()
    assert token_text(tokenizer, 257) == "<|im_end|>"
    assert token_text(tokenizer, None) is None
    inner = base_tokenizer(tokenizer)
    assert isinstance(inner, FileTokenizer)
    assert inner.control_tokens == {"<|im_start|>": 256, "<|im_end|>": 257}


def test_plain_tokenizers_have_no_special_tokens() -> None:
    assert special_tokens(ByteTokenizer()) == SpecialTokens()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bos": 258}, "bos must be an id below 258, not 258"),
        ({"eos": [1, -1]}, "eos must be an id below 258, not -1"),
        ({"eos": 3}, "eos must be a list of ids"),
        ({"pad": True}, "pad must be an id below 258, not True"),
        ({"adds_bos": 1}, "adds_bos must be true or false"),
        ({"chat_template": ["x"]}, "chat_template must be text"),
        ({"more": 1}, "an object of bos, eos"),
    ],
)
def test_damaged_special_tokens_are_refused(change: dict[str, Any], message: str) -> None:
    state = chat_tokenizer().to_json()
    state["special"].update(change)
    with pytest.raises(DataError, match=message):
        from_json(state)


def test_special_tokens_are_not_nested() -> None:
    tokenizer = chat_tokenizer()
    with pytest.raises(DataError, match="of another kind"):
        from_json(LanguageTokenizer(tokenizer, SPECIAL).to_json())
