"""A sentencepiece tokenizer as llama.cpp's ``llama`` (pieces merged by score) or ``t5``
(unigrams).
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from typing import Any

from arb_ternary_interchange.gguf.tokens import TokenKind, Vocabulary, end_of_text, refused
from arb_ternary_interchange.sentencepiece_model import (
    BPE,
    UNIGRAM,
    SentencePieceModel,
    read_model,
)


def from_sentencepiece(tokenizer: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary of a tokenizer of the kind ``sentencepiece``.

    Raises:
        DataError: llama.cpp has no tokenizer that gives the same ids.
    """
    model = read_model(b64decode(tokenizer["model"]))
    if model.algorithm not in (BPE, UNIGRAM) or not model.escapes:
        raise refused(
            "it is a sentencepiece model of words or characters",
            "those of the types bpe and unigram",
        )
    tokens = [piece.text for piece in model.pieces]
    kinds = [piece.kind for piece in model.pieces]
    if model.algorithm == BPE:
        _check_merges(model, kinds)
    elif TokenKind.BYTE in kinds:
        raise refused(
            "it is of unigrams and writes unknown characters as bytes",
            "unigrams without --byte_fallback",
        )
    return Vocabulary(
        model="llama" if model.algorithm == BPE else "t5",
        tokens=tokens,
        kinds=kinds,
        end=end_of_text(tokens, "<0x00>"),
        unknown=model.roles["unk"],
        scores=[piece.score for piece in model.pieces],
        characters=model.characters if model.algorithm == UNIGRAM else None,
        flags={"add_space_prefix": model.prefix, "remove_extra_whitespaces": model.strips},
    )


def _check_merges(model: SentencePieceModel, kinds: list[TokenKind]) -> None:
    """Raise DataError unless the model does what llama.cpp's ``llama`` does: it replaces no
    characters, keeps all spaces, and writes what it has no piece for as bytes.
    """
    if model.characters or model.strips:
        raise refused(
            "it normalises text before it merges pieces",
            "a bpe model trained with --normalization_rule_name=identity "
            "--remove_extra_whitespaces=false",
        )
    if kinds.count(TokenKind.BYTE) != 256:
        raise refused("it has no pieces for bytes", "a bpe model trained with --byte_fallback")
