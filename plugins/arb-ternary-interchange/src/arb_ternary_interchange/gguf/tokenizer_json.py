"""A file of the ``tokenizers`` library as llama.cpp's ``gpt2`` or ``llama`` tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from arb_ternary_interchange.gguf.pre_tokenizers import CUTS, cut_of
from arb_ternary_interchange.gguf.tokens import TokenKind, Vocabulary, end_of_text, refused
from arb_ternary_text.data.byte_level import BYTE_CHARACTERS


def from_tokenizer_json(tokenizer: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a tokenizer of the kind ``file``.

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
    for option in (
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "fuse_unk",
    ):
        if model.get(option) and not (option == "unk_token" and model[option] in model["vocab"]):
            raise refused(f"`{option}` is {model[option]!r}", "no such option")
    if definition.get("normalizer") not in (None, {"type": "NFC"}):
        raise refused(
            f"it normalises text by {definition['normalizer'].get('type')!r}", "NFC or nothing"
        )
    if (definition.get("decoder") or {}).get("type") != "ByteLevel":
        raise refused("its decoder is not ByteLevel", "GPT-2's bytes")
    cut = cut_of(definition.get("pre_tokenizer"), bool(model.get("ignore_merges")))
    if cut is None:
        raise refused(
            "its `pre_tokenizer` is none that llama.cpp has a name for",
            ", ".join(cut.name for cut in CUTS),
        )
    tokens, kinds = _tokens(definition)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return Vocabulary(
        "gpt2",
        tokens,
        kinds,
        end=end_of_text(tokens, BYTE_CHARACTERS[0]),
        pre=cut.name,
        merges=merges,
    )


def _pieces(definition: Mapping[str, Any]) -> Vocabulary:
    """Merges of pieces with U+2581 for spaces, as in Llama 2: llama.cpp merges by the score of what
    comes out.

    That is the same where all ways to put a piece together are merges, and stand together in the
    list.
    """
    model = definition["model"]
    ranks: dict[str, int] = {}
    listed = set()
    last = ""
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        if ranks.setdefault(left + right, rank) != rank and last != left + right:
            raise refused(
                f"the merges that make {left + right!r} do not stand together",
                "merges sorted by what they make",
            )
        last = left + right
        listed.add((left, right))
    tokens, kinds = _tokens(definition)
    vocabulary = model["vocab"]
    for text in ranks:
        for cut in range(1, len(text)):
            pair = (text[:cut], text[cut:])
            if pair not in listed and pair[0] in vocabulary and pair[1] in vocabulary:
                raise refused(
                    f"{pair[0]!r} and {pair[1]!r} are not merged, although {text!r} is a token",
                    "all merges",
                )
    kinds = [
        TokenKind.BYTE if _is_byte(text) else kind for text, kind in zip(tokens, kinds, strict=True)
    ]
    if kinds.count(TokenKind.BYTE) != 256:
        raise refused("it has no tokens for all bytes", "<0x00> to <0xFF>")
    unknown = model.get("unk_token")
    return Vocabulary(
        "llama",
        tokens,
        kinds,
        end=end_of_text(tokens, "<0x00>"),
        unknown=vocabulary.get(unknown),
        scores=[-float(ranks.get(text, len(ranks) + len(listed))) for text in tokens],
        flags={"add_space_prefix": _space_prefix(definition)},
    )


def _space_prefix(definition: Mapping[str, Any]) -> bool:
    """Whether a space is put before a text; a tokenizer that does anything else to a text is
    refused.
    """
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    normalizer = definition.get("normalizer")
    cut = definition.get("pre_tokenizer")
    steps = (
        normalizer["normalizers"]
        if normalizer and normalizer.get("type") == "Sequence"
        else [normalizer]
    )
    if cut is None and steps == [prepend, replace]:
        return True
    if cut is None and steps == [replace]:
        return False
    raise refused("it changes or cuts texts", "U+2581 for spaces, and one before the text or not")


def _is_byte(text: str) -> bool:
    return re.fullmatch(r"<0x[0-9A-F]{2}>", text) is not None


def _tokens(definition: Mapping[str, Any]) -> tuple[list[str], list[TokenKind]]:
    """Texts and kinds by id, ids without a token included."""
    by_id = {
        number: (text, TokenKind.NORMAL) for text, number in definition["model"]["vocab"].items()
    }
    for added in definition.get("added_tokens") or ():
        if (
            added["normalized"]
            and not added["special"]
            and added["content"] in definition["model"]["vocab"]
        ):
            continue
        by_id[added["id"]] = (
            added["content"],
            TokenKind.CONTROL if added["special"] else TokenKind.USER_DEFINED,
        )
    size = max(by_id, default=-1) + 1
    filled = [by_id.get(i, (f"[PAD{i}]", TokenKind.UNUSED)) for i in range(size)]
    return [text for text, _ in filled], [kind for _, kind in filled]
