"""A run's tokenizer as the keys ``tokenizer.ggml.*`` of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from arb_ternary.errors import DataError
from arb_ternary_interchange.gguf.tokenizer_json import from_tokenizer_json
from arb_ternary_interchange.gguf.tokenizer_sentencepiece import from_sentencepiece
from arb_ternary_interchange.gguf.tokens import TokenKind, Vocabulary
from arb_ternary_interchange.gguf.values import Value
from arb_ternary_text.data.byte_level import BYTE_CHARACTERS


def vocabulary_keys(tokenizer: Mapping[str, Any] | None, vocabulary_size: int) -> dict[str, Value]:
    """The metadata of a tokenizer.

    Args:
        tokenizer: ``to_json`` of a tokenizer; None where the run has none.
        vocabulary_size: ids of the model, of which there may be more than of the tokenizer.

    Raises:
        DataError: there is none, or llama.cpp has none that gives the same ids.
    """
    while tokenizer is not None and tokenizer.get("kind") == "padded":
        tokenizer = tokenizer["tokenizer"]
    kind = None if tokenizer is None else tokenizer.get("kind")
    if tokenizer is None or kind not in _FORMS:
        raise DataError(
            *_REASONS.get(kind, (f"tokenizer: a GGUF file cannot hold the kind {kind!r}", ""))
        )
    vocabulary = _FORMS[kind](tokenizer)
    if len(vocabulary.tokens) > vocabulary_size:
        raise DataError(
            f"tokenizer: it has {len(vocabulary.tokens)} ids, and the model {vocabulary_size}",
            "The run's tokenizer and its model do not belong together.",
        )
    return vocabulary.keys(vocabulary_size)


def _bytes(_tokenizer: Mapping[str, Any]) -> Vocabulary:
    # Without merges every byte stays a token of its own, whatever a text is cut into.
    return Vocabulary(
        "gpt2", BYTE_CHARACTERS, [TokenKind.NORMAL] * 256, end=0, pre="gpt-2", merges=()
    )


_FORMS: Final = {"bytes": _bytes, "file": from_tokenizer_json, "sentencepiece": from_sentencepiece}

_REASONS: Final = {
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
        "Export the run of a text, or use `--format safetensors`.",
    ),
}
