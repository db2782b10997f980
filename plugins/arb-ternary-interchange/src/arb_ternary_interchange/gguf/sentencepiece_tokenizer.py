"""A sentencepiece tokenizer as llama.cpp's ``llama`` (pieces merged by score) or ``t5``
(unigrams).
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from arb_ternary.errors import DataError, EnvironmentProblem
from arb_ternary.plugins.discovery import install_command
from arb_ternary_interchange.gguf.tokens import TokenKind, Vocabulary, end_of_text, refused

#: Algorithms of a model; others split into words or characters.
_UNIGRAM: Final = 1
_BPE: Final = 2


def from_sentencepiece(tokenizer: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary of a tokenizer of the kind ``sentencepiece``.

    Raises:
        DataError: llama.cpp has no tokenizer that gives the same ids.
        EnvironmentProblem: a package that reads such models is not installed.
    """
    model = _read_model(b64decode(tokenizer["model"]))
    algorithm = model.trainer_spec.model_type
    normalizer = model.normalizer_spec
    if algorithm not in (_BPE, _UNIGRAM) or not normalizer.escape_whitespaces:
        raise refused(
            "it is a sentencepiece model of words or characters",
            "those of the types bpe and unigram",
        )
    tokens = [piece.piece for piece in model.pieces]
    kinds = [TokenKind(piece.type) for piece in model.pieces]
    if algorithm == _BPE:
        _check_merges(normalizer, kinds)
    elif TokenKind.BYTE in kinds:
        raise refused(
            "it is of unigrams and writes unknown characters as bytes",
            "unigrams without --byte_fallback",
        )
    return Vocabulary(
        model="llama" if algorithm == _BPE else "t5",
        tokens=tokens,
        kinds=kinds,
        end=end_of_text(tokens, "<0x00>"),
        unknown=model.trainer_spec.unk_id,
        scores=[piece.score for piece in model.pieces],
        characters=normalizer.precompiled_charsmap if algorithm == _UNIGRAM else None,
        flags={
            "add_space_prefix": normalizer.add_dummy_prefix,
            "remove_extra_whitespaces": normalizer.remove_extra_whitespaces,
        },
    )


def _read_model(content: bytes) -> Any:
    """Return a ``.model`` file as the message of protocol buffers that it is."""
    try:
        messages = import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError as error:
        raise EnvironmentProblem(
            "the tokenizer file needs the packages `sentencepiece` and `protobuf`, which are not "
            "installed",
            install_command("arb-ternary-text[sentencepiece]"),
        ) from error
    try:
        model = messages.ModelProto.FromString(content)
    except Exception as error:  # DecodeError of the package protobuf
        raise DataError(f"tokenizer: the sentencepiece model is damaged: {error}") from error
    if not model.pieces:
        raise DataError("tokenizer: the sentencepiece model has no pieces")
    return model


def _check_merges(normalizer: Any, kinds: list[TokenKind]) -> None:
    """Raise DataError unless the model does what llama.cpp's ``llama`` does: it replaces no
    characters, keeps all spaces, and writes what it has no piece for as bytes.
    """
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        raise refused(
            "it normalises text before it merges pieces",
            "a bpe model trained with --normalization_rule_name=identity "
            "--remove_extra_whitespaces=false",
        )
    if kinds.count(TokenKind.BYTE) != 256:
        raise refused("it has no pieces for bytes", "a bpe model trained with --byte_fallback")
