"""Special tokens and chat templates survive a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from arb_ternary_interchange.gguf.exporter import GgufExporter
from arb_ternary_interchange.gguf.reader import GgufFile
from arb_ternary_interchange.gguf.vocabulary import read_vocabulary, vocabulary_keys
from arb_ternary_interchange.gguf.writer import write_gguf
from arb_ternary_interchange.options import GgufConfig
from arb_ternary_text.data.byte_level import BYTE_CHARACTERS
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.special_tokens import SpecialTokens
from arb_ternary_text.data.tokenizers import ByteTokenizer, LanguageTokenizer, padded_to

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eom|>", "<|more|>")
Written = Callable[..., GgufFile]


def chat_tokenizer(special: SpecialTokens) -> LanguageTokenizer:
    library = Tokenizer(models.BPE({c: i for i, c in enumerate(BYTE_CHARACTERS)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    return LanguageTokenizer(FileTokenizer(library.to_str()), special)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Write a file with a tokenizer, with some keys changed, and return it."""

    def write(state: dict[str, Any], size: int, **changes: Any) -> GgufFile:
        keys = vocabulary_keys(state, size)
        for name, value in changes.items():
            key = f"tokenizer.ggml.{name}"
            if value is None:
                del keys[key]
            else:
                keys[key] = value
        path = tmp_path / "tokenizer.gguf"
        write_gguf(path, keys, [])
        return GgufFile(path)

    return write


@pytest.mark.parametrize(
    "special",
    [
        SpecialTokens(bos=257, eos=(258,), pad=256, unk=256, adds_bos=True),
        SpecialTokens(eos=(258, 256, 259), adds_eos=True, chat_template="{{ bos_token }}é"),
        SpecialTokens(bos=256),
    ],
)
@pytest.mark.parametrize("size", [261, 300])
def test_special_tokens_come_back(written: Written, special: SpecialTokens, size: int) -> None:
    file = written(padded_to(chat_tokenizer(special).to_json(), size), size)
    found, notes = read_vocabulary(file.metadata, size)
    assert found is not None
    assert notes == ()
    back = SpecialTokens.from_json(found["special"], size)
    if not special.eos:
        # llama.cpp takes token 11 if a file names no end, so one of a usual name is written.
        assert back.eos == (256,)
        back = SpecialTokens(**{**back.to_json(), "eos": ()})
    assert back == special


def test_the_keys_are_those_of_llama_cpp(written: Written) -> None:
    special = SpecialTokens(bos=257, eos=(258, 256, 259), pad=260, adds_bos=True)
    metadata = written(chat_tokenizer(special).to_json(), 261).metadata
    expected = {
        "bos_token_id": 257,
        "eos_token_id": 258,
        "eot_token_id": 256,
        "eom_token_id": 259,
        "padding_token_id": 260,
        "add_bos_token": True,
        "add_eos_token": False,
    }
    assert {name: metadata[f"tokenizer.ggml.{name}"] for name in expected} == expected


def test_more_than_three_ends_are_named() -> None:
    exporter = GgufExporter(GgufConfig())
    special = SpecialTokens(eos=(258, 256, 259, 260))
    (note,) = exporter.unmapped({"tokenizer": chat_tokenizer(special).to_json()})
    assert note == "a GGUF file names 3 tokens that end a text; left out: <|more|>"
    few = SpecialTokens(eos=(258, 256, 259))
    assert exporter.unmapped({"tokenizer": chat_tokenizer(few).to_json()}) == ()
    assert exporter.unmapped({"tokenizer": ByteTokenizer().to_json()}) == ()


def test_bytes_without_special_tokens_stay_bytes(written: Written) -> None:
    file = written(ByteTokenizer().to_json(), 256)
    assert read_vocabulary(file.metadata, 256) == ({"kind": "bytes"}, ())


def test_an_id_outside_the_vocabulary_is_named(written: Written) -> None:
    from arb_ternary_interchange.gguf.values import Kind, Scalar

    file = written(
        chat_tokenizer(SpecialTokens(bos=257, eos=(258,))).to_json(),
        261,
        bos_token_id=Scalar(Kind.UINT32, 900),
        add_bos_token=Scalar(Kind.STRING, "yes"),
    )
    found, notes = read_vocabulary(file.metadata, 261)
    assert found is not None
    assert found["special"]["bos"] is None
    assert found["special"]["eos"] == [258]
    assert notes == (
        "tokenizer.ggml.bos_token_id is 900, which is no id of the tokenizer",
        "tokenizer.ggml.add_bos_token is 'yes', which is neither true nor false",
    )


def test_llama_3_adds_bos_without_a_key(written: Written) -> None:
    from arb_ternary_interchange.gguf.values import Kind, Scalar

    state = chat_tokenizer(SpecialTokens(bos=257, eos=(258,))).to_json()
    file = written(state, 261, add_bos_token=None, pre=Scalar(Kind.STRING, "llama-bpe"))
    found, _ = read_vocabulary(file.metadata, 261)
    assert found is not None
    assert found["special"]["adds_bos"] is True
    assert json.dumps(found)
