from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.errors import DataError, EnvironmentProblem
from arb_ternary.plugins.discovery import install_command
from arb_ternary_text.data.file_tokenizers import FileTokenizer, SentencePieceTokenizer
from arb_ternary_text.data.shakespeare import ShakespeareConfig
from arb_ternary_text.data.tokenizers import (
    ByteTokenizer,
    CharacterTokenizer,
    IdTokenizer,
    PaddedTokenizer,
    Tokenizer,
    UnknownCharacterError,
    build_tokenizer,
    encode_stream,
    from_json,
    load_tokenizer,
)

texts = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def definition():
    """Return a tokenizer file with gaps in its ids, truncation, padding and special tokens."""
    library = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 9}
    tokenizer = library.Tokenizer(library.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[BOS]"])
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", tokenizer.token_to_id("[BOS]"))]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=16)
    return tokenizer.to_str()


@pytest.fixture(scope="module")
def pieces():
    """Return the content of a small sentencepiece model with byte fallback."""
    from io import BytesIO

    import sentencepiece

    model = BytesIO()
    words = [
        "to be or not to be that is the question",
        "whether tis nobler in the mind to suffer",
    ] * 20
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(words),
        model_writer=model,
        vocab_size=320,
        byte_fallback=True,
        model_type="bpe",
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


@given(texts)
def test_bytes_are_the_utf_8_of_the_text_and_come_back(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.encode_array(text).tolist() == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_invalid_utf_8_decodes_to_replacement_characters():
    assert ByteTokenizer().decode([65, 0xC3, 66]) == "A\ufffdB"


@given(texts, texts)
def test_characters_come_back_and_are_numbered_by_code_point(text, more):
    tokenizer = CharacterTokenizer.from_text(text + more + "x")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == [sorted(set(text + more + "x")).index(character) for character in text]
    assert tokenizer == CharacterTokenizer.from_text("x" + more[::-1] + text)


def test_an_unknown_character_is_named_with_its_offset():
    with pytest.raises(UnknownCharacterError) as caught:
        CharacterTokenizer.from_text("abc\n").encode("abc\ncaé")
    assert (
        caught.value.what
        == "the text: character 'é' (U+00E9) at offset 6 is not in the tokenizer's alphabet"
    )
    assert (caught.value.character, caught.value.offset) == ("é", 6)


@pytest.mark.parametrize("character", ["\x00", "0", "~", "\U0010ffff"])
def test_characters_outside_the_alphabet_are_unknown(character):
    with pytest.raises(UnknownCharacterError):
        CharacterTokenizer.from_text("1aZ").encode(character)


def test_half_a_surrogate_pair_has_no_bytes():
    with pytest.raises(UnknownCharacterError, match=r"U\+D800\) at offset 2"):
        ByteTokenizer().encode("ab\ud800")


def test_ids_are_written_as_numbers():
    tokenizer = IdTokenizer(50257)
    assert tokenizer.encode(" 12 7\n50256") == [12, 7, 50256]
    assert tokenizer.decode([12, 7]) == "12 7"
    with pytest.raises(DataError, match="'be' is not a token id"):
        tokenizer.encode("12 be")
    with pytest.raises(
        DataError, match="token id 50257 at index 1 is outside the vocabulary: 0 to 50256"
    ):
        tokenizer.encode("1 50257")


@pytest.mark.parametrize(
    "tokenizer",
    [ByteTokenizer(), CharacterTokenizer.from_text("abc"), IdTokenizer(3)],
    ids=lambda t: type(t).__name__,
)
def test_an_id_outside_the_vocabulary_is_not_decoded(tokenizer):
    assert tokenizer.decode([]) == ""
    for wrong in (-1, tokenizer.vocabulary_size):
        with pytest.raises(DataError, match=f"token id {wrong} at index 1"):
            tokenizer.decode([0, wrong])


def test_a_file_keeps_every_token_and_adds_none(definition):
    tokenizer = FileTokenizer(definition)
    assert tokenizer.encode("to be or not to be ?") == [1, 2, 3, 9, 1, 2, 0]
    assert tokenizer.decode([1, 2]) == "to be"
    assert tokenizer.decode([json.loads(definition)["added_tokens"][0]["id"], 1]) == "[BOS] to"


def test_a_vocabulary_with_holes_has_room_for_its_largest_id(definition):
    tokenizer = FileTokenizer(definition)
    assert tokenizer.encode("not") == [9]
    assert tokenizer.vocabulary_size == 10  # six tokens, the largest id is 9


@pytest.mark.parametrize("kind", ["bytes", "characters", "ids", "file", "sentencepiece", "padded"])
def test_every_tokenizer_survives_json_and_keeps_the_protocol(kind, request):
    tokenizer = {
        "bytes": lambda: ByteTokenizer(),
        "characters": lambda: CharacterTokenizer.from_text("to be é\U0001f600"),
        "ids": lambda: IdTokenizer(77),
        "file": lambda: FileTokenizer(request.getfixturevalue("definition")),
        "sentencepiece": lambda: SentencePieceTokenizer.from_bytes(
            request.getfixturevalue("pieces")
        ),
        "padded": lambda: PaddedTokenizer(ByteTokenizer(), 300),
    }[kind]()
    rebuilt = from_json(json.loads(json.dumps(tokenizer.to_json())))
    assert rebuilt == tokenizer
    assert rebuilt.vocabulary_size == tokenizer.vocabulary_size
    assert isinstance(rebuilt, Tokenizer)
    text = "7 7" if kind == "ids" else "to be"
    assert rebuilt.encode(text) == tokenizer.encode(text)


def test_a_sentencepiece_file_has_the_ids_of_the_library(pieces, tmp_path):
    import sentencepiece

    (tmp_path / "tokenizer.model").write_bytes(pieces)
    tokenizer = build_tokenizer(str(tmp_path / "tokenizer.model"))
    library = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    text = "to be, or not: \u00e9\U0001f600!"
    assert tokenizer.encode(text) == library.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocabulary_size == library.vocab_size()
    with pytest.raises(DataError, match="outside the vocabulary"):
        tokenizer.decode([library.vocab_size()])


def test_a_damaged_sentencepiece_file_is_named(pieces, tmp_path):
    for number, content in enumerate((b"", b"no protocol buffer", pieces[: len(pieces) // 2])):
        path = tmp_path / f"{number}.model"
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"sentencepiece") as caught:
            load_tokenizer(path)
        assert caught.value.what.startswith(f"{path}: ")
    with pytest.raises(DataError, match="not base64"):
        from_json({"kind": "sentencepiece", "model": "?"})


def test_missing_sentencepiece_names_the_install_command(pieces, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(EnvironmentProblem) as caught:
        from_json(SentencePieceTokenizer.from_bytes(pieces).to_json())
    assert caught.value.hint == install_command("arb-ternary-text[sentencepiece]")


def test_padding_adds_ids_that_decode_to_replacements():
    padded = PaddedTokenizer(ByteTokenizer(), 300)
    assert padded.encode("ab") == [97, 98]
    assert padded.decode([97, 299, 256, 98]) == "a\ufffdb"
    with pytest.raises(DataError, match="outside the vocabulary: 0 to 299"):
        padded.decode([300])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"kind": "padded"}, "has two fields"),
        (
            {"kind": "padded", "tokenizer": {"kind": "bytes"}, "vocabulary_size": "300"},
            "a whole number of ids",
        ),
        (
            {"kind": "padded", "tokenizer": {"kind": "bytes"}, "vocabulary_size": 256},
            "padded to 256 ids, but it has 256",
        ),
        (
            {"kind": "padded", "tokenizer": {"kind": "padded"}, "vocabulary_size": 256},
            "a tokenizer of another kind",
        ),
    ],
)
def test_padding_is_checked(state, message):
    with pytest.raises(DataError, match=message):
        from_json(state)


def test_a_saved_tokenizer_can_be_named_by_its_path(tmp_path, definition):
    (tmp_path / "hf.json").write_text(definition, encoding="utf-8")
    assert build_tokenizer(str(tmp_path / "hf.json")) == FileTokenizer(definition)
    characters = CharacterTokenizer.from_text("aé")
    (tmp_path / "ours.json").write_text(json.dumps(characters.to_json()))
    assert build_tokenizer(str(tmp_path / "ours.json")) == characters


def test_a_config_names_bytes_and_characters_by_a_word():
    assert build_tokenizer("bytes") == ByteTokenizer()
    assert build_tokenizer("characters", "banana") == CharacterTokenizer("abn")
    with pytest.raises(DataError, match="token files have none"):
        build_tokenizer("characters")
    with pytest.raises(
        ValueError,
        match=r"'tokenizer' must be bytes, characters or the path of a \.json or \.model file, not "
        r"'byts'",
    ):
        ShakespeareConfig(tokenizer="byts")


def test_missing_tokenizers_names_the_install_command(tmp_path, monkeypatch):
    (tmp_path / "hf.json").write_text('{"model": {}}')
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(EnvironmentProblem) as caught:
        load_tokenizer(tmp_path / "hf.json")
    assert caught.value.what.startswith(str(tmp_path / "hf.json"))
    assert caught.value.hint == install_command("arb-ternary-text[tokenizers]")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[1]", "is not a tokenizer"),
        (b'{"vocab": {}}', "is not a tokenizer"),
        (
            b'{"kind": "words"}',
            "kind must be one of bytes, characters, ids, file, sentencepiece, padded and "
            "language, not 'words'",
        ),
        (
            b'{"kind": "bytes", "size": 3}',
            "kind bytes has no further field; these were given: size",
        ),
        (
            b'{"kind": "characters"}',
            r"kind characters has one field, alphabet \(str\); these were given: none",
        ),
        (b'{"kind": "characters", "alphabet": 3}', "kind characters has one field"),
        (b'{"kind": "characters", "alphabet": "ba"}', "order of code points"),
        (b'{"kind": "characters", "alphabet": ""}', "the alphabet is empty"),
        (b'{"kind": "ids", "vocabulary_size": 0}', "kind ids: "),
    ],
)
def test_a_damaged_tokenizer_file_is_named(tmp_path, content, message):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(path)
    assert caught.value.what.startswith(f"{path}: ")


def test_a_file_that_the_library_refuses_is_named(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "t.json").write_text('{"model": {"type": "nonsense"}}')
    with pytest.raises(
        DataError, match=r"t\.json: the tokenizer file cannot be read by the package `tokenizers`"
    ):
        load_tokenizer(tmp_path / "t.json")


def test_a_text_that_the_library_cannot_encode_is_an_error(tmp_path):
    pytest.importorskip("tokenizers")
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    (tmp_path / "t.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    )
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert tokenizer.encode("a") == [0]
    with pytest.raises(
        DataError, match="the text cannot be encoded by the package `tokenizers`: WordLevel error"
    ):
        tokenizer.encode("b")


def test_a_missing_tokenizer_file_is_named(tmp_path):
    with pytest.raises(
        DataError, match=r"gone\.json: the tokenizer file cannot be read: No such file"
    ):
        load_tokenizer(tmp_path / "gone.json")


@pytest.mark.parametrize(
    ("size", "dtype"), [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)]
)
def test_a_stream_has_the_smallest_dtype_for_its_ids(size, dtype):
    stream = encode_stream(IdTokenizer(size), f"0 {size - 1}")
    assert stream.dtype == dtype
    assert stream.tolist() == [0, size - 1]
