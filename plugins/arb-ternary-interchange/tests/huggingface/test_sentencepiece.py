"""Exported sentencepiece models: transformers gives the ids of the training."""

from __future__ import annotations

import io
import json
import random
import sys
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from arb_ternary.errors import ConfigError
from arb_ternary_interchange.huggingface import tokenizer_conversion
from arb_ternary_interchange.huggingface.tokenizer_files import read_tokenizer, write_tokenizer
from arb_ternary_text.data.shakespeare import load_text
from arb_ternary_text.data.tokenizers import from_json
from arb_ternary_text.models.decoder import Decoder

IDENTITY = {"normalization_rule_name": "identity"}
KEEPS_SPACES = {**IDENTITY, "remove_extra_whitespaces": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "keeps spaces": KEEPS_SPACES,
    "no prefix": {**KEEPS_SPACES, "add_dummy_prefix": False},
    "strips spaces": IDENTITY,
    "case": {"normalization_rule_name": "nmt_nfkc_cf"},
    "symbols": {"user_defined_symbols": ["<sep>", "<|user|>"], "control_symbols": ["<|end|>"]},
    "spaces as symbols": {"user_defined_symbols": ["<sep>", "\n", "▁▁▁"], **KEEPS_SPACES},
}
TEXTS = (
    "",
    " ",
    "   ",
    "To be, or not to be",
    " a leading space",
    "  two  spaces   three    four ",
    "\ttabs\tand\n\nline breaks\r\nof\r\n\r\nboth kinds \n",
    "👋🏽 👩‍👩‍👧 ❤️ 1️⃣ 🇩🇪 ☺",
    "Grüße, 世界! и мир ٣٤٥ नमस्ते हिन्दी ภาษาไทย น้ำ",
    "مَدْرَسَةٌ شَدَّةٌ ﷺ ﻻ بְּרֵאשִׁית",
    "ﬁne ① ½ Ⅳ ㎏ ™ ﬃ \uff46\uff55\u3000\uff57 ｱｲｳ",
    "Tiếng Việt ấm ầu, nǚ, Grüße, 한국어 각각, ガパが, ᾧ ΐ",
    "nbsp\u00a0 zero\u200bwidth می\u200c \ufeffbom \x00\x01\x7f\u2028\u3000",
    "<sep>a<sep> <|user|><|user|> b<sep>",
    " <sep>",
    "a" * 700 + " " * 9 + "aaab" * 50,
)


def trained(**options: Any) -> bytes:
    content = io.BytesIO()
    lines = [*load_text("train")[:40_000].splitlines(), *["Grüße, naïve 世界"] * 5]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=content,
        minloglevel=2,
        num_threads=1,
        **{"vocab_size": 450, **options},
    )
    return content.getvalue()


@pytest.fixture
def convert_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers convert tokenizers in this process, which has imported it."""
    monkeypatch.setattr(tokenizer_conversion, "_run", tokenizer_conversion.write_answer)


def state_of(content: bytes) -> dict[str, Any]:
    return {"kind": "sentencepiece", "model": b64encode(content).decode()}


def samples(processor: Any) -> list[str]:
    """Return texts, excerpts of a text, and pieces in a random order."""
    generator = random.Random(0)
    text = load_text("validation")
    starts = [generator.randrange(len(text) - 300) for _ in range(50)]
    pieces = [
        processor.IdToPiece(i).replace("▁", " ")
        for i in range(processor.GetPieceSize())
        if not (processor.IsControl(i) or processor.IsUnknown(i) or processor.IsByte(i))
    ]
    joined = ["".join(generator.choices(pieces, k=30)) for _ in range(200)]
    return [*TEXTS, *(text[start : start + 200] for start in starts), *pieces, *joined]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("convert_here")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("fallback", [True, False], ids=["bytes", "unknown"])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_transformers_gives_the_ids_of_sentencepiece(
    tmp_path: Path, kind: str, fallback: bool, options: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    if kind == "unigram" and options is OPTIONS["spaces as symbols"]:
        return  # refused, see below
    content = trained(model_type=kind, byte_fallback=fallback, **options)
    write_tokenizer(tmp_path, state_of(content), 32)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(content)
    for text in samples(processor):
        wanted = processor.EncodeAsIds(text)
        assert theirs(text)["input_ids"] == wanted, text
        if processor.unk_id() not in wanted:
            assert theirs.decode(wanted) == processor.DecodeIds(wanted), text
    found = read_tokenizer(tmp_path, "llama")
    assert found.notes == ()
    assert found.state is not None
    again = from_json(found.state)
    assert again.vocabulary_size == processor.GetPieceSize()
    assert again.encode(TEXTS[3]) == processor.EncodeAsIds(TEXTS[3])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("convert_here")
def test_control_pieces_are_special_tokens_with_their_roles(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    content = trained(model_type="bpe", control_symbols=["<|end|>"], pad_id=4, eos_piece="<eos>")
    write_tokenizer(tmp_path, state_of(content), 32)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(content)
    assert theirs.bos_token_id == processor.bos_id() == 1
    assert (theirs.eos_token, theirs.eos_token_id) == ("<eos>", processor.eos_id())
    assert theirs.pad_token_id == processor.pad_id() == 4
    assert theirs.unk_token_id == processor.unk_id()
    end = processor.PieceToId("<|end|>")
    parts = ["To be", " or not"]
    both = [*processor.EncodeAsIds(parts[0]), end, *processor.EncodeAsIds(parts[1])]
    assert theirs("<|end|>".join(parts))["input_ids"] == both
    assert theirs.decode([*processor.EncodeAsIds("To be"), end], skip_special_tokens=True) == (
        "To be"
    )
    without = trained(model_type="bpe", bos_id=-1, eos_id=-1)
    write_tokenizer(tmp_path, state_of(without), 32)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert {"bos_token", "eos_token", "pad_token"} & settings.keys() == set()


@pytest.mark.filterwarnings("ignore")
def test_a_folder_needs_neither_sentencepiece_nor_protobuf(
    tmp_path: Path,
    make_decoder: Callable[..., Decoder],
    export: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import AutoTokenizer

    content = trained(model_type="unigram")
    folder = export(
        make_decoder(architecture="llama", vocabulary_size=450), tmp_path / "out", state_of(content)
    )
    assert not (folder / "tokenizer.model").exists()
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(content)
    for name in ("sentencepiece", "google"):
        monkeypatch.setitem(sys.modules, name, None)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs(TEXTS[5])["input_ids"] == processor.EncodeAsIds(TEXTS[5])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("convert_here")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "word"}, r"the text .* would be \[0\] instead of \["),
        (OPTIONS["spaces as symbols"], r"the text .* would be \[.*\] instead of \["),
        ({"treat_whitespace_as_suffix": True}, r"the text .* would be \[.*\] instead of \["),
    ],
)
def test_other_sentencepiece_models_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    state = state_of(trained(**options, hard_vocab_limit=False))
    with pytest.raises(ConfigError, match=message) as caught:
        write_tokenizer(tmp_path, state, 32)
    assert caught.value.what.startswith("tokenizer: transformers has none that gives the same ids")
    assert "-o tokenizer=false" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
