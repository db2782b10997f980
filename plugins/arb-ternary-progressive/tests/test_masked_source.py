"""A data source with one more id."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from arb_ternary.errors import DataError
from arb_ternary_progressive.masked_source import with_mask_token
from arb_ternary_testing.component import make_choice
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.tokenizers import (
    ByteTokenizer,
    CharacterTokenizer,
    IdTokenizer,
    from_json,
)


def test_bytes_have_a_free_id_already() -> None:
    assert with_mask_token(ByteTokenizer()) == ByteTokenizer()
    every = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    assert max(ByteTokenizer().encode_array(every)) < 255


def test_characters_get_an_id_at_the_end() -> None:
    plain = CharacterTokenizer("abcz")
    masked = with_mask_token(plain)
    assert masked.vocabulary_size == 5
    assert masked.encode("cabz") == plain.encode("cabz") == [2, 0, 1, 3]
    assert from_json(masked.to_json()) == masked
    with pytest.raises(DataError, match=r"contains U\+10FFFF"):
        with_mask_token(masked)


def test_ids_get_an_id_at_the_end() -> None:
    assert with_mask_token(IdTokenizer(100)) == IdTokenizer(101)


def test_a_tokenizer_file_gets_an_id_at_the_end() -> None:
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(
        library.models.WordLevel({"to": 0, "be": 1, "[UNK]": 2}, unk_token="[UNK]")
    )
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>"])
    plain = FileTokenizer(made.to_str())
    masked = with_mask_token(plain)
    assert (plain.vocabulary_size, masked.vocabulary_size) == (4, 5)
    assert masked.encode("to be or <s>") == plain.encode("to be or <s>") == [0, 1, 2, 3]
    assert masked.decode([4]) == "\U0010ffff"
    assert from_json(json.loads(json.dumps(masked.to_json()))).vocabulary_size == 5


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    class Own:
        vocabulary_size = 3

    with pytest.raises(DataError, match="a tokenizer of the class Own cannot get another id"):
        with_mask_token(Own())


def test_the_streams_are_unchanged(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 40)
    options = {"name": "text", "path": str(text), "tokenizer": "characters"}
    plain = make_choice("data", "text", {k: v for k, v in options.items() if k != "name"}).build()
    masked = make_choice("data", "with_mask_token", {"source": options}).build()
    assert np.array_equal(masked.train, plain.train)
    assert np.array_equal(masked.validation, plain.validation)
    assert masked.tokenizer.vocabulary_size == plain.tokenizer.vocabulary_size + 1
    assert max(masked.train) < plain.tokenizer.vocabulary_size
    assert masked.fingerprint() != plain.fingerprint()
    assert masked.name == "text with mask token"
