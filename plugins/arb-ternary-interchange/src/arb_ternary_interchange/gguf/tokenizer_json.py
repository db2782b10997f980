"""A file of the ``tokenizers`` library as llama.cpp's tokenizer ``gpt2`` or ``llama``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from arb_ternary_interchange.gguf.pre_tokenizers import PRE_TOKENIZERS, find_pre_tokenizer
from arb_ternary_interchange.gguf.tokens import TokenKind, Vocabulary, end_of_text, refused
from arb_ternary_text.data.byte_level import BYTE_CHARACTERS

#: Options of a BPE model that llama.cpp does not have.
_UNKNOWN_OPTIONS: Final = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
)
#: The steps by which Llama 2's tokenizers write spaces as U+2581, and put one before a text.
_REPLACE_SPACES: Final = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
_PREPEND_SPACE: Final = {"type": "Prepend", "prepend": "\u2581"}


def from_tokenizer_json(tokenizer: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary of a tokenizer of the kind ``file``.

    Raises:
        DataError: llama.cpp has no tokenizer that gives the same ids.
    """
    definition = json.loads(tokenizer["definition"])
    model = definition["model"]
    if model.get("type") != "BPE":
        raise refused(
            f"its model is {model.get('type')!r}",
            "BPE; of unigrams, the sentencepiece .model file that the tokenizer.json was made of",
        )
    return _pieces(definition) if model.get("byte_fallback") else _byte_level(definition)


def _byte_level(definition: Mapping[str, Any]) -> Vocabulary:
    model = definition["model"]
    for option in _UNKNOWN_OPTIONS:
        value = model.get(option)
        has_no_effect = option == "unk_token" and value in model["vocab"]
        if value and not has_no_effect:
            raise refused(f"`{option}` is {value!r}", "no such option")
    normalizer = definition.get("normalizer")
    if normalizer not in (None, {"type": "NFC"}):
        raise refused(f"it normalises text by {normalizer.get('type')!r}", "NFC or nothing")
    if (definition.get("decoder") or {}).get("type") != "ByteLevel":
        raise refused("its decoder is not ByteLevel", "GPT-2's bytes")
    ignore_merges = bool(model.get("ignore_merges"))
    splitting = find_pre_tokenizer(definition.get("pre_tokenizer"), ignore_merges)
    if splitting is None:
        raise refused(
            "llama.cpp has no name for its `pre_tokenizer`",
            ", ".join(known.name for known in PRE_TOKENIZERS),
        )
    tokens, kinds = _tokens(definition)
    return Vocabulary(
        model="gpt2",
        tokens=tokens,
        kinds=kinds,
        end=end_of_text(tokens, BYTE_CHARACTERS[0]),
        pre=splitting.name,
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
    )


def _pieces(definition: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary of merges of pieces with U+2581 for spaces, as in Llama 2.

    llama.cpp merges by the score of the result. That is the same if all ways to put a piece
    together are merges, and stand together in the list.
    """
    model = definition["model"]
    vocabulary = model["vocab"]
    ranks, pairs = _ranked_merges(model["merges"])
    for text in ranks:
        for place in range(1, len(text)):
            left = text[:place]
            right = text[place:]
            if (left, right) not in pairs and left in vocabulary and right in vocabulary:
                raise refused(
                    f"{left!r} and {right!r} are not merged, although {text!r} is a token",
                    "all merges",
                )
    tokens, kinds = _tokens(definition)
    for number, text in enumerate(tokens):
        if re.fullmatch(r"<0x[0-9A-F]{2}>", text):
            kinds[number] = TokenKind.BYTE
    if kinds.count(TokenKind.BYTE) != 256:
        raise refused("it has no tokens for all bytes", "<0x00> to <0xFF>")
    last = len(ranks) + len(pairs)
    return Vocabulary(
        model="llama",
        tokens=tokens,
        kinds=kinds,
        end=end_of_text(tokens, "<0x00>"),
        unknown=vocabulary.get(model.get("unk_token")),
        scores=[-float(ranks.get(text, last)) for text in tokens],
        flags={"add_space_prefix": _has_space_prefix(definition)},
    )


def _ranked_merges(merges: list[Any]) -> tuple[dict[str, int], set[tuple[str, str]]]:
    """Return the rank of the first merge that makes each text, and all pairs.

    Raises:
        DataError: merges that make the same text do not stand together.
    """
    ranks: dict[str, int] = {}
    pairs = set()
    last = ""
    for rank, merge in enumerate(merges):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        text = left + right
        if text in ranks and last != text:
            raise refused(
                f"the merges that make {text!r} do not stand together",
                "merges sorted by what they make",
            )
        ranks.setdefault(text, rank)
        pairs.add((left, right))
        last = text
    return ranks, pairs


def _has_space_prefix(definition: Mapping[str, Any]) -> bool:
    """Whether a space is put before a text; a tokenizer that does anything else to a text is
    refused.
    """
    normalizer = definition.get("normalizer")
    steps = [normalizer]
    if normalizer and normalizer.get("type") == "Sequence":
        steps = normalizer["normalizers"]
    if definition.get("pre_tokenizer") is None:
        if steps == [_PREPEND_SPACE, _REPLACE_SPACES]:
            return True
        if steps == [_REPLACE_SPACES]:
            return False
    raise refused("it changes or splits texts", "U+2581 for spaces, and one before the text or not")


def _tokens(definition: Mapping[str, Any]) -> tuple[list[str], list[TokenKind]]:
    """Return texts and kinds by id, ids without a token included."""
    vocabulary = definition["model"]["vocab"]
    by_id = {number: (text, TokenKind.NORMAL) for text, number in vocabulary.items()}
    for added in definition.get("added_tokens") or ():
        text = added["content"]
        if added["special"]:
            by_id[added["id"]] = (text, TokenKind.CONTROL)
        elif not added["normalized"] or text not in vocabulary:
            by_id[added["id"]] = (text, TokenKind.USER_DEFINED)
    size = max(by_id, default=-1) + 1
    filled = [by_id.get(i, (f"[PAD{i}]", TokenKind.UNUSED)) for i in range(size)]
    return [text for text, _ in filled], [kind for _, kind in filled]
