"""Tokenizers: llama.cpp gives the same ids as the run's tokenizer, and an import restores it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from arb_ternary.errors import DataError
from arb_ternary_interchange.gguf.model import GgufModel
from arb_ternary_interchange.gguf.pre_tokenizers import PRE_TOKENIZERS
from arb_ternary_interchange.gguf.reader import GgufFile
from arb_ternary_interchange.gguf.vocabulary import vocabulary_keys
from arb_ternary_text.data.shakespeare import load_text
from arb_ternary_text.data.tokenizers import ByteTokenizer, PaddedTokenizer, base_state, from_json
from arb_ternary_text.models.decoder import Decoder

Make = Callable[..., Decoder]
Export = Callable[..., Path]

TINY = {"width": 64, "layers": 1, "heads": 2, "feed_forward": 64}

#: Words, numbers, runs of spaces, other scripts, emoji, apostrophes, line ends.
SAMPLES = [
    "To be, or not to be: that is the question",
    "It's 12345 o'clock,\n\n  isn't IT?  I'LL see\tyou'Re\r\n   ",
    "Grüße aus Köln, 世界 и мир 👋🏽 ½ ٣٤٥ naïve",
    "x = [1, 2.5e-3]; // --> done!!!   ",
]


def train_text() -> str:
    return load_text("train")[:60_000]


@pytest.fixture(scope="module")
def byte_level() -> Callable[[str], dict[str, Any]]:
    """Make a tokenizer.json of 400 tokens that splits as ``name`` says, with a special token."""

    def make(name: str) -> dict[str, Any]:
        splitting = next(known for known in PRE_TOKENIZERS if known.name == name)
        tokenizer = Tokenizer(models.BPE(ignore_merges=splitting.ignore_merges))
        parts = splitting.definition.get("pretokenizers", [splitting.definition])
        made: list[Any] = []
        for part in parts:
            if part["type"] == "Split":
                made.append(pre_tokenizers.Split(Regex(part["pattern"]["Regex"]), "isolated"))
            elif part["type"] == "Digits":
                made.append(pre_tokenizers.Digits(individual_digits=True))
            else:
                made.append(
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=part["use_regex"])
                )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(made) if len(made) > 1 else made[0]
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[AddedToken("<|endoftext|>", special=True)],
            show_progress=False,
        )
        tokenizer.train_from_iterator([train_text()], trainer)
        return {"kind": "file", "definition": tokenizer.to_str()}

    return make


def sentencepiece_model(**options: Any) -> bytes:
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(train_text().splitlines()),
        model_writer=content,
        vocab_size=450,
        minloglevel=2,
        num_threads=1,
        **{"byte_fallback": True, **options},
    )
    return content.getvalue()


PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@pytest.fixture(scope="module")
def pieces() -> bytes:
    """Train a sentencepiece model of merges."""
    return sentencepiece_model(model_type="bpe", **PLAIN)


def serialised(content: bytes) -> dict[str, Any]:
    from arb_ternary_text.data.file_tokenizers import SentencePieceTokenizer

    return SentencePieceTokenizer.from_bytes(content).to_json()


def check_ids(state: dict[str, Any], server: Any) -> None:
    tokenizer = from_json(state)
    for text in SAMPLES:
        assert server.reads_as(text, tokenizer.encode(text)), text


def test_every_ascii_character_and_utf_8_are_bytes_in_llama_cpp(
    make_decoder: Make, export: Export, llama_cpp: Any
) -> None:
    server = llama_cpp(export(make_decoder("llama", **TINY)))
    for text in [
        *map(chr, range(128)),
        *SAMPLES,
        "\U0010ffff\u0800\u07ff",
        bytes(range(128)).decode(),
    ]:
        assert server.reads_as(text, list(text.encode())), text


def test_bytes_of_a_model_with_more_ids_stay_bytes(
    make_decoder: Make, export: Export, llama_cpp: Any
) -> None:
    state = PaddedTokenizer(ByteTokenizer(), 260).to_json()
    path = export(make_decoder("llama", vocabulary_size=260, **TINY), tokenizer=state)
    assert llama_cpp(path).reads_as("Grüße", list("Grüße".encode()))
    assert GgufModel(GgufFile(path)).tokenizer == {"kind": "bytes"}


@pytest.mark.parametrize("name", [known.name for known in PRE_TOKENIZERS])
def test_byte_level_merges_give_the_same_ids_and_come_back(
    make_decoder: Make,
    export: Export,
    llama_cpp: Any,
    byte_level: Callable[[str], dict[str, Any]],
    name: str,
) -> None:
    state = byte_level(name)
    path = export(make_decoder("llama", vocabulary_size=400, **TINY), tokenizer=state)
    check_ids(state, llama_cpp(path, space=from_json(state).encode("a")[0]))
    model = GgufModel(GgufFile(path))
    assert model.unmapped == ()
    assert model.tokenizer is not None
    inner = base_state(model.tokenizer)
    assert inner is not None
    before = json.loads(state["definition"])
    after = json.loads(inner["definition"])
    assert after["model"]["vocab"] == before["model"]["vocab"]
    assert after["model"]["merges"] == before["model"]["merges"]
    assert after["added_tokens"] == before["added_tokens"]
    again = from_json(model.tokenizer)
    tokenizer = from_json(state)
    for text in SAMPLES:
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text)) == text


def test_sentencepiece_merges_give_the_same_ids(
    make_decoder: Make, export: Export, llama_cpp: Any, pieces: bytes
) -> None:
    state = serialised(pieces)
    path = export(make_decoder("llama", vocabulary_size=450, **TINY), tokenizer=state)
    check_ids(state, llama_cpp(path, space=from_json(state).encode("a")[-1]))


@pytest.mark.parametrize("options", [PLAIN, {}], ids=["identity", "nmt_nfkc"])
def test_sentencepiece_unigrams_give_the_same_ids(
    make_decoder: Make, export: Export, llama_cpp: Any, options: dict[str, Any]
) -> None:
    state = serialised(sentencepiece_model(model_type="unigram", byte_fallback=False, **options))
    path = export(make_decoder("llama", vocabulary_size=450, **TINY), tokenizer=state)
    check_ids(state, llama_cpp(path, space=from_json(state).encode("a")[-1]))


def as_tokenizer_json(content: bytes, *, prefix: bool) -> dict[str, Any]:
    """Return a tokenizer.json as Llama 2 has it, made of a sentencepiece model of merges."""
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(content)
    vocabulary = {processor.IdToPiece(i): i for i in range(processor.GetPieceSize())}
    ranked = sorted(vocabulary, key=lambda text: vocabulary[text])
    merges = [
        (text[:cut], text[cut:])
        for text in ranked
        for cut in range(1, len(text))
        if text[:cut] in vocabulary and text[cut:] in vocabulary
    ]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    definition = json.loads(tokenizer.to_str())
    steps = [prepend, replace] if prefix else [replace]
    definition["normalizer"] = {"type": "Sequence", "normalizers": steps} if prefix else replace
    return {"kind": "file", "definition": json.dumps(definition)}


@pytest.mark.parametrize("prefix", [True, False])
def test_merges_of_pieces_give_the_same_ids(
    make_decoder: Make, export: Export, llama_cpp: Any, pieces: bytes, prefix: bool
) -> None:
    state = as_tokenizer_json(pieces, prefix=prefix)
    path = export(make_decoder("llama", vocabulary_size=450, **TINY), tokenizer=state)
    check_ids(state, llama_cpp(path, space=from_json(state).encode("a")[-1]))


def changed(state: dict[str, Any], **parts: Any) -> dict[str, Any]:
    definition = json.loads(state["definition"])
    for path, value in parts.items():
        holder = definition["model"] if path in definition["model"] else definition
        holder[path] = value
    return {**state, "definition": json.dumps(definition)}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"pre_tokenizer": {"type": "Whitespace"}},
        "llama.cpp has no name for its `pre_tokenizer`",
    ),
    (
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
        "no name for its `pre_tokenizer`",
    ),
    ({"ignore_merges": True}, "no name for its `pre_tokenizer`"),
    ({"normalizer": {"type": "Lowercase"}}, "it normalises text by 'Lowercase'"),
    ({"decoder": None}, "its decoder is not ByteLevel"),
    ({"continuing_subword_prefix": "##"}, "`continuing_subword_prefix` is '##'"),
    ({"type": "WordPiece"}, "its model is 'WordPiece'"),
]


@pytest.mark.parametrize(("parts", "message"), REFUSED)
def test_a_tokenizer_that_llama_cpp_does_not_have_is_refused(
    byte_level: Callable[[str], dict[str, Any]], parts: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        vocabulary_keys(changed(byte_level("gpt-2"), **parts), 400)
    assert caught.value.what.startswith("tokenizer: llama.cpp has none that gives the same ids: ")
    assert message in caught.value.what


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"kind": "characters", "alphabet": "abc"}, "knows no tokenizer of single characters"),
        ({"kind": "ids", "vocabulary_size": 9}, "does not know which text they are"),
        (None, "the run has none"),
        ({"kind": "words"}, "cannot hold the kind 'words'"),
        ({"kind": "bytes"}, "it has 256 ids, but the model 9"),
        ({"kind": "sentencepiece", "model": "AAAA"}, "the sentencepiece model"),
    ],
)
def test_a_missing_tokenizer_is_refused_with_the_reason(
    state: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        vocabulary_keys(state, 9)
    assert message in caught.value.what


def test_sentencepiece_models_unknown_to_llama_cpp_are_refused() -> None:
    for options, message in (
        ({"model_type": "bpe"}, "it normalises text before it merges pieces"),
        ({"model_type": "bpe", "byte_fallback": False, **PLAIN}, "it has no pieces for bytes"),
        ({"model_type": "unigram"}, "it is of unigrams and writes unknown characters as bytes"),
        (
            {"model_type": "char", "hard_vocab_limit": False},
            "it is a sentencepiece model of words or characters",
        ),
    ):
        with pytest.raises(DataError, match=message):
            vocabulary_keys(serialised(sentencepiece_model(**options)), 450)


def test_merges_that_are_not_all_of_a_vocabulary_are_refused(pieces: bytes) -> None:
    state = as_tokenizer_json(pieces, prefix=True)
    merges = json.loads(state["definition"])["model"]["merges"]
    with pytest.raises(DataError, match="are not merged, although"):
        vocabulary_keys(
            changed(state, merges=[m for m in merges if m != ["t", "h"]] + [["th", "e"]]), 450
        )
