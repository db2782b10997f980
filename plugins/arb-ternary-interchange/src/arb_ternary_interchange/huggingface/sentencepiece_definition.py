"""A sentencepiece model as a ``tokenizer.json`` with the same ids.

The library ``tokenizers`` does not run sentencepiece's models. It has parts from which a tokenizer
can be put together that does the same to nearly all texts; where it does not, the model is refused.
"""

from __future__ import annotations

import json
import random
import re
from base64 import b64encode
from collections.abc import Iterator
from typing import Any, Final

from arb_ternary.errors import ConfigError
from arb_ternary_interchange.gguf.tokens import TokenKind
from arb_ternary_interchange.sentencepiece_model import (
    BPE,
    UNIGRAM,
    SentencePieceModel,
)
from arb_ternary_text.data.file_tokenizers import FileTokenizer, SentencePieceTokenizer

_SPACE: Final = "\u2581"
#: A character that is in no text (Unicode reserves it for programs).
_BREAK: Final = "\U0010ffff"
#: Rules of sentencepiece that replace characters; all compose letters and marks as NFC does.
_TABLES: Final = ("nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf")
#: Marks of Hebrew and Arabic whose order NFC changes and sentencepiece does not.
_VOWELS: Final = (
    r"[\x{591}-\x{5bd}\x{5bf}-\x{5c7}\x{610}-\x{61a}\x{64b}-\x{652}\x{656}-\x{65f}\x{670}]"
)
#: Where a character goes on that people see as one: marks, joiners, and a line feed.
_CONTINUED: Final = r"(?=[\p{M}\x{200c}\x{200d}])|(?<=\r)(?=\n)"
#: The letters of a piece that stands for a byte are not that piece. Without ``<`` they match none.
_BYTE_LETTERS: Final = r"<(?=0x[0-9A-F]{2}>)"

#: Texts on which both tokenizers are compared: spaces, line ends, scripts, marks that compose,
#: characters that are replaced, emoji, control characters, and the letters of pieces.
_PROBES: Final = (
    "",
    "   ",
    "To be, or not to be: that is the question. It's 12345 o'clock!",
    "  two  spaces,   three    and four     ",
    "\ttabs\t\tand\n\nline\r\nends\r\n\r\n of \r all kinds \n ",
    "Grüße aus Köln, naïve 世界, и мир, ٣٤٥, नमस्ते, ภาษาไทย น้ำ, 한국어, שָׁלוֹם, مَدْرَسَةٌ شَدَّة",
    "ﬁne ① ½ Ⅳ ㎏ ™ ﬃ \uff46\uff55\u3000\uff57 ｶﾞﾊﾟｱ ﬁ\u0301 a\u00a0b\u200bc\u3000",
    "u\u0308\u0304 e\u0302\u0301 \u1112\u1161\u11ab\u1100\u1173\u11af \u30ab\u3099 A\u030a",
    "👋🏽 👩‍👩‍👧 ❤️ 1️⃣ 🇩🇪 ☺",
    "▁ a ▁▁ b ▁",
    "<0x0A><0x41 <unused>",
    "a" * 99 + " " * 9 + "ab" * 50,
    "\x00\x01\x7f\x85\ufeff\ufffd",
)
_PIECES_PER_PROBE: Final = 24


def tokenizer_definition(model: SentencePieceModel, content: bytes) -> dict[str, Any]:
    """Return the content of a ``tokenizer.json`` for a sentencepiece model.

    A text gives the ids that sentencepiece gives. Control pieces become special tokens: their
    letters in a text are the token, and the text between two of them gives the ids that it has
    alone.

    Args:
        model: the model.
        content: the bytes of its ``.model`` file.

    Raises:
        ConfigError: there is no such file that gives the same ids.
        EnvironmentProblem: the package ``tokenizers`` or ``sentencepiece`` is not installed.
    """
    if model.algorithm not in (BPE, UNIGRAM) or not model.escapes:
        raise _refused("it is a sentencepiece model of words or characters")
    if model.has_kind(TokenKind.UNUSED):
        raise _refused("it is a sentencepiece model with unused pieces")
    if model.characters and model.table not in _TABLES:
        raise _refused(f"it replaces characters by rules of its own ({model.table!r})")
    special = [
        (number, piece.text)
        for number, piece in enumerate(model.pieces)
        if piece.kind in (TokenKind.CONTROL, TokenKind.UNKNOWN)
    ]
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special_token(number, text) for number, text in special],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(model)},
        "pre_tokenizer": _pre_tokenizer(model),
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": _decoders(model)},
        "model": _bpe(model) if model.algorithm == BPE else _unigram(model),
    }
    wanted = SentencePieceTokenizer.from_bytes(content)
    found = FileTokenizer(json.dumps(definition))
    for text in _probes(model, [text for _, text in special]):
        right = wanted.encode(text)
        ids = found.encode(text)
        if ids != right:
            raise _refused(f"the text {text!r} would be {ids} instead of {right}")
    return definition


def special_roles(model: SentencePieceModel) -> dict[str, str]:
    """Return the pieces with a role in a text, by their key in ``tokenizer_config.json``."""
    return {
        f"{role}_token": model.pieces[number].text
        for role, number in model.roles.items()
        if 0 <= number < len(model.pieces)
    }


def _refused(what: str) -> ConfigError:
    return ConfigError(
        f"tokenizer: transformers has none that gives the same ids: {what}",
        "Export without it: `-o tokenizer=false`. Sentencepiece models of the types bpe and "
        "unigram have a form there, others do not.",
    )


def _probes(model: SentencePieceModel, special: list[str]) -> Iterator[str]:
    """Yield texts in which no special token is spelled: :data:`_PROBES`, each piece, and all
    pieces in a random order.
    """
    kinds = (TokenKind.NORMAL, TokenKind.USER_DEFINED)
    pieces = [piece.text.replace(_SPACE, " ") for piece in model.pieces if piece.kind in kinds]
    mixed = random.Random(0).sample(pieces, len(pieces))
    starts = range(0, len(mixed), _PIECES_PER_PROBE)
    joined = ["".join(mixed[start : start + _PIECES_PER_PROBE]) for start in starts]
    spelled = re.compile("|".join(map(re.escape, special)))
    for text in (*_PROBES, *joined, *pieces):
        if not spelled.search(text):
            yield text


# --- the parts of a tokenizer.json


def _special_token(number: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": True}


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _normalizers(model: SentencePieceModel) -> list[dict[str, Any]]:
    """Return the steps that change a text before it is cut into pieces."""
    steps: list[dict[str, Any]] = []
    if model.characters:
        table = b64encode(model.characters).decode("ascii")
        compose = {"type": "NFC"}
        # "Precompiled" looks letters up together with their marks and drops what it does not find.
        # So letters are composed first, and what is left is kept apart.
        steps = [
            _replace(f"(?<={_VOWELS})(?={_VOWELS})", _BREAK),
            compose,
            _replace(_CONTINUED, _BREAK),
            {"type": "Precompiled", "precompiled_charsmap": table},
            compose,
            _replace(_BREAK, ""),
        ]
    if model.strips:
        steps += [_replace(rf"\A +|[ {_SPACE}]+\z", ""), _replace(" {2,}", " ")]
    if model.prefix:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    return [*steps, _replace(" ", _SPACE)]


def _pre_tokenizer(model: SentencePieceModel) -> dict[str, Any] | None:
    """Return where a text is cut: merges do not reach into user-defined pieces, and unigrams do
    not take the letters of a byte for the byte.
    """
    pieces = [piece.text for piece in model.pieces if piece.kind == TokenKind.USER_DEFINED]
    if model.algorithm == BPE and pieces:
        longest_first = sorted(pieces, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first))
        behavior = "Isolated"
    elif model.algorithm == UNIGRAM and model.has_kind(TokenKind.BYTE):
        pattern = _BYTE_LETTERS
        behavior = "MergedWithPrevious"
    else:
        return None
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def _decoders(model: SentencePieceModel) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    ]
    if model.has_kind(TokenKind.BYTE):
        steps.append({"type": "ByteFallback"})
    steps.append({"type": "Fuse"})
    if model.prefix or model.strips:
        spaces = 1 << 30 if model.strips else 1
        steps.append({"type": "Strip", "content": " ", "start": spaces, "stop": 0})
    return steps


def _bpe(model: SentencePieceModel) -> dict[str, Any]:
    normal = {
        piece.text: (-piece.score, number)
        for number, piece in enumerate(model.pieces)
        if piece.kind == TokenKind.NORMAL
    }
    merges = []
    for text, rank in normal.items():
        for place in range(1, len(text)):
            left = text[:place]
            right = text[place:]
            if left in normal and right in normal:
                merges.append((*rank, left, right))
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": model.pieces[model.roles["unk"]].text,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.has_kind(TokenKind.BYTE),
        # No merges make a user-defined piece.
        "ignore_merges": model.has_kind(TokenKind.USER_DEFINED),
        "vocab": {piece.text: number for number, piece in enumerate(model.pieces)},
        "merges": [merge[2:] for merge in sorted(merges)],
    }


def _unigram(model: SentencePieceModel) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": model.roles["unk"],
        "vocab": [(piece.text, piece.score) for piece in model.pieces],
        "byte_fallback": model.has_kind(TokenKind.BYTE),
    }
