"""The tokenizer of a GGUF file, as ``to_json`` of one of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from arb_ternary_interchange.gguf.metadata import ArrayInFile, Metadata
from arb_ternary_interchange.gguf.pre_tokenizers import CUTS
from arb_ternary_interchange.gguf.tokens import TokenKind
from arb_ternary_interchange.gguf.values import Kind
from arb_ternary_text.data.byte_level import BYTE_CHARACTERS, byte_level_bpe

_Found = tuple[Mapping[str, Any] | None, tuple[str, ...]]

#: Most merges of a tokenizer for each of its ids; Llama 3's has 2.2.
_MERGES_PER_TOKEN: Final = 4

#: Most tokens, and most merges: four times those of the largest tokenizers.
_MAX_ITEMS: Final = 1 << 21


def read_vocabulary(metadata: Metadata, vocabulary_size: int) -> _Found:
    """The tokenizer, or None, and what could not be read of it, a sentence each.

    Args:
        metadata: of the file.
        vocabulary_size: ids of the model.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokens", vocabulary_size)
    if not tokens:
        return None, (
            f"the tokenizer (tokenizer.ggml.model: {model!r}) has no list of tokens that fits the "
            f"model",
        )
    if model == "gpt2":
        return _byte_level(metadata, tokens, vocabulary_size)
    return None, (
        f"the tokenizer is of the kind {model!r}, which is not rebuilt; read are those of the kind "
        f"'gpt2'",
    )


def _byte_level(metadata: Metadata, tokens: list[str], vocabulary_size: int) -> _Found:
    merges = _strings(metadata, "merges", _MERGES_PER_TOKEN * vocabulary_size)
    if merges is None:
        return None, ("the tokenizer has no list of merges",)
    if not merges and tokens[:256] == list(BYTE_CHARACTERS) and _only_unused(metadata, len(tokens)):
        return {"kind": "bytes"}, ()
    pre = metadata.get("tokenizer.ggml.pre")
    cut = next((cut for cut in CUTS if cut.name == pre), None)
    if cut is None:
        names = ", ".join(cut.name for cut in CUTS)
        return None, (
            f"the tokenizer cuts texts as {pre!r} says, which is not rebuilt; known are {names}",
        )
    kinds = _kinds(metadata, len(tokens))
    if kinds is None or len(set(tokens)) != len(tokens):
        return None, ("the tokenizer's tokens have no kinds, or one of them stands twice",)
    added = [
        {
            "id": number,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == TokenKind.CONTROL,
        }
        for number, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED)
    ]
    vocabulary = {
        text: number for number, text in enumerate(tokens) if kinds[number] != TokenKind.UNUSED
    }
    pairs = [merge.split(" ") for merge in merges]
    if not all(len(pair) == 2 and {*pair, "".join(pair)} <= vocabulary.keys() for pair in pairs):
        return None, ("a merge of the tokenizer is no pair of tokens that make a token",)
    definition = byte_level_bpe(
        vocabulary,
        pairs,
        pre_tokenizer=cut.pre_tokenizer,
        decoder={
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        added=added,
        ignore_merges=cut.ignore_merges,
    )
    return {"kind": "file", "definition": json.dumps(definition, ensure_ascii=False)}, ()


def _strings(metadata: Metadata, name: str, most: int) -> list[str] | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if (
        not isinstance(value, ArrayInFile)
        or value.kind is not Kind.STRING
        or len(value) > min(most, _MAX_ITEMS)
    ):
        return None
    return list(value)


def _kinds(metadata: Metadata, count: int) -> list[int] | None:
    value = metadata.get("tokenizer.ggml.token_type")
    if (
        not isinstance(value, ArrayInFile)
        or value.kind not in (Kind.INT32, Kind.UINT32)
        or len(value) != count
    ):
        return None
    return list(value)


def _only_unused(metadata: Metadata, count: int) -> bool:
    """Whether all ids beyond the bytes are unused."""
    kinds = _kinds(metadata, count)
    return kinds is not None and all(kind == TokenKind.UNUSED for kind in kinds[256:])
