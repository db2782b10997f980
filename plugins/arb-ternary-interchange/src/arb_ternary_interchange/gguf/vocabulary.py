"""A run's tokenizer as the keys ``tokenizer.ggml.*`` of a GGUF file, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from arb_ternary.errors import DataError
from arb_ternary_interchange.gguf.metadata import ArrayInFile, Metadata
from arb_ternary_interchange.gguf.pre_tokenizers import PRE_TOKENIZERS
from arb_ternary_interchange.gguf.sentencepiece_tokenizer import from_sentencepiece
from arb_ternary_interchange.gguf.special_tokens import read_special_tokens, special_token_keys
from arb_ternary_interchange.gguf.tokenizer_json import from_tokenizer_json
from arb_ternary_interchange.gguf.tokens import TokenKind, Vocabulary
from arb_ternary_interchange.gguf.values import Kind, Value
from arb_ternary_text.data.byte_level import BYTE_CHARACTERS, byte_level_bpe
from arb_ternary_text.data.special_tokens import SpecialTokens
from arb_ternary_text.data.tokenizers import base_state

#: A tokenizer, as ``to_json`` writes it, or None; and what could not be read of it.
_Found = tuple[Mapping[str, Any] | None, tuple[str, ...]]

#: Most merges of a tokenizer for each of its ids; Llama 3's has 2.2.
_MERGES_PER_TOKEN: Final = 4
#: Most tokens, and most merges: four times those of the largest tokenizers.
_MAX_ITEMS: Final = 1 << 21


# --- out


def vocabulary_keys(tokenizer: Mapping[str, Any] | None, vocabulary_size: int) -> dict[str, Value]:
    """Return the metadata of a tokenizer.

    Args:
        tokenizer: ``to_json`` of a tokenizer; None if the run has none.
        vocabulary_size: number of ids of the model; it may be larger than the tokenizer's.

    Raises:
        DataError: there is none, or llama.cpp has none that gives the same ids.
    """
    base = base_state(tokenizer)
    kind = None if base is None else base.get("kind")
    if tokenizer is None or base is None or kind not in _FORMS:
        unknown = (f"tokenizer: a GGUF file cannot hold the kind {kind!r}", "")
        raise DataError(*_REASONS.get(kind, unknown))
    vocabulary = _FORMS[kind](base)
    if len(vocabulary.tokens) > vocabulary_size:
        raise DataError(
            f"tokenizer: it has {len(vocabulary.tokens)} ids, but the model {vocabulary_size}",
            "The run's tokenizer and its model do not belong together.",
        )
    keys = vocabulary.keys(vocabulary_size)
    if tokenizer.get("kind") == "language":
        special = SpecialTokens.from_json(tokenizer["special"], vocabulary_size)
        keys |= special_token_keys(special)
    return keys


def _bytes(_tokenizer: Mapping[str, Any]) -> Vocabulary:
    # Without merges every byte stays a token of its own, however a text is split.
    return Vocabulary(
        model="gpt2",
        tokens=BYTE_CHARACTERS,
        kinds=[TokenKind.NORMAL] * 256,
        end=0,
        pre="gpt-2",
        merges=(),
    )


_FORMS: Final[Mapping[Any, Callable[[Mapping[str, Any]], Vocabulary]]] = {
    "bytes": _bytes,
    "file": from_tokenizer_json,
    "sentencepiece": from_sentencepiece,
}

_REASONS: Final[Mapping[Any, tuple[str, str]]] = {
    "characters": (
        "tokenizer: llama.cpp knows no tokenizer of single characters, so that a GGUF file cannot "
        "hold `characters`",
        "Train with `tokenizer: bytes`, or with a tokenizer.json.",
    ),
    "ids": (
        "tokenizer: the run was trained on token ids, and does not know which text they are",
        "Name the tokenizer's .json file in the data section of the config.",
    ),
    None: (
        "tokenizer: the run has none, and a GGUF file needs one",
        "Export a run that was trained on text, or use `--format safetensors`.",
    ),
}


# --- in


def read_vocabulary(metadata: Metadata, vocabulary_size: int) -> _Found:
    """Return the tokenizer of a file, or None, and what could not be read of it, one sentence each.

    Args:
        metadata: metadata of the file.
        vocabulary_size: number of ids of the model.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokens", vocabulary_size)
    listed = metadata.get("tokenizer.ggml.tokens")
    if isinstance(listed, ArrayInFile) and len(listed) > vocabulary_size:
        return None, (
            f"the tokenizer has {len(listed)} ids and the model {vocabulary_size}: the run reads "
            f"ids; llama.cpp does not load such a file",
        )
    if not tokens:
        return None, (
            f"the tokenizer (tokenizer.ggml.model: {model!r}) has no list of tokens that fits the "
            f"model",
        )
    if model != "gpt2":
        return None, (f"the tokenizer is of the kind {model!r}, which is not read; only 'gpt2' is",)
    merges = _strings(metadata, "merges", _MERGES_PER_TOKEN * vocabulary_size)
    if merges is None:
        return None, ("the tokenizer has no list of merges",)
    kinds = _kinds(metadata, len(tokens))
    if not merges and _is_bytes(tokens, kinds):
        found: _Found = ({"kind": "bytes"}, ())
    else:
        found = _byte_level(metadata, tokens, kinds, merges)
    return _with_special_tokens(metadata, found, len(tokens))


def _with_special_tokens(metadata: Metadata, found: _Found, size: int) -> _Found:
    """Return a tokenizer with its special tokens, if the file has any."""
    state, notes = found
    if state is None:
        return found
    if state["kind"] == "bytes":
        size = 256
    special, further = read_special_tokens(metadata, size)
    # A file of bytes has to name some end of a text: the byte 0, which no text has.
    plain = SpecialTokens(eos=(0,)) if state["kind"] == "bytes" else SpecialTokens()
    if special != plain:
        state = {"kind": "language", "tokenizer": state, "special": special.to_json()}
    return state, notes + further


def _is_bytes(tokens: list[str], kinds: list[int] | None) -> bool:
    """Whether the tokens are the bytes; all further ids have to be unused."""
    if kinds is None or tokens[:256] != list(BYTE_CHARACTERS):
        return False
    return all(kind == TokenKind.UNUSED for kind in kinds[256:])


def _byte_level(
    metadata: Metadata, tokens: list[str], kinds: list[int] | None, merges: list[str]
) -> _Found:
    pre = metadata.get("tokenizer.ggml.pre")
    splitting = next((known for known in PRE_TOKENIZERS if known.name == pre), None)
    if splitting is None:
        names = ", ".join(known.name for known in PRE_TOKENIZERS)
        return None, (
            f"the tokenizer splits texts by {pre!r}, which is not read; known are {names}",
        )
    if kinds is None or len(set(tokens)) != len(tokens):
        return None, ("the tokenizer's tokens have no kinds, or one of them occurs twice",)
    added = []
    vocabulary = {}
    for number, (text, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED):
            added.append(_added_token(number, text, special=kind == TokenKind.CONTROL))
        if kind != TokenKind.UNUSED:
            vocabulary[text] = number
    pairs = [merge.split(" ") for merge in merges]
    for pair in pairs:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            return None, ("a merge of the tokenizer is not a pair of tokens that make a token",)
    definition = byte_level_bpe(
        vocabulary,
        pairs,
        pre_tokenizer=splitting.definition,
        decoder={
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        added=added,
        ignore_merges=splitting.ignore_merges,
    )
    return {"kind": "file", "definition": json.dumps(definition, ensure_ascii=False)}, ()


def _added_token(number: int, text: str, *, special: bool) -> dict[str, Any]:
    return {
        "id": number,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _strings(metadata: Metadata, name: str, most: int) -> list[str] | None:
    """Return a list of strings of the tokenizer; None if it is missing or too long."""
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, ArrayInFile) or value.kind is not Kind.STRING:
        return None
    return list(value) if len(value) <= min(most, _MAX_ITEMS) else None


def _kinds(metadata: Metadata, count: int) -> list[int] | None:
    """Return the kinds of ``count`` tokens; None if the file has fewer."""
    value = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(value, ArrayInFile) or value.kind not in (Kind.INT32, Kind.UINT32):
        return None
    return list(value) if len(value) == count else None
