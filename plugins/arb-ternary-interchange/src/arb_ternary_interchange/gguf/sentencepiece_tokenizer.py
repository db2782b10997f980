"""A sentencepiece tokenizer as llama.cpp's ``llama`` (pieces merged by score) or ``t5``
(unigrams).

https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto describes the
``.model`` file: a message of protocol buffers. Only a few of its fields are read here.
"""

from __future__ import annotations

import struct
from base64 import b64decode
from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import define, field

from arb_ternary.errors import DataError
from arb_ternary_interchange.gguf.tokens import TokenKind, Vocabulary, end_of_text, refused

_UNIGRAM: Final = 1
_BPE: Final = 2

#: Kinds of fields of a message, with the ``struct`` format of the fixed-size ones.
_VARINT: Final = 0
_BYTES: Final = 2
_FIXED: Final = {1: "<d", 5: "<f"}


@define
class _Piece:
    """A piece of a sentencepiece model: text, score and kind."""

    text: str
    score: float
    kind: TokenKind


@define
class _Model:
    """A sentencepiece model.

    Attributes:
        pieces: piece of each id.
        algorithm: unigram or BPE; others split into words or characters.
        unknown: id of what no piece is for.
        characters: the compiled table by which characters are replaced first.
        prefix: whether a space is put before a text.
        strips: whether spaces at the ends and runs of them are dropped.
        escapes: whether spaces become U+2581.
    """

    pieces: list[_Piece] = field(factory=list)
    algorithm: int = _UNIGRAM
    unknown: int = 0
    characters: bytes = b""
    prefix: bool = True
    strips: bool = True
    escapes: bool = True


def from_sentencepiece(tokenizer: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary of a tokenizer of the kind ``sentencepiece``.

    Raises:
        DataError: llama.cpp has no tokenizer that gives the same ids.
    """
    model = _read_model(b64decode(tokenizer["model"]))
    if model.algorithm not in (_BPE, _UNIGRAM) or not model.escapes:
        raise refused(
            "it is a sentencepiece model of words or characters",
            "those of the types bpe and unigram",
        )
    tokens = [piece.text for piece in model.pieces]
    kinds = [piece.kind for piece in model.pieces]
    if model.algorithm == _BPE:
        _check_merges(model, kinds)
    elif TokenKind.BYTE in kinds:
        raise refused(
            "it is of unigrams and writes unknown characters as bytes",
            "unigrams without --byte_fallback",
        )
    return Vocabulary(
        model="llama" if model.algorithm == _BPE else "t5",
        tokens=tokens,
        kinds=kinds,
        end=end_of_text(tokens, "<0x00>"),
        unknown=model.unknown,
        scores=[piece.score for piece in model.pieces],
        characters=model.characters if model.algorithm == _UNIGRAM else None,
        flags={"add_space_prefix": model.prefix, "remove_extra_whitespaces": model.strips},
    )


def _check_merges(model: _Model, kinds: list[TokenKind]) -> None:
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


# --- the file


def _read_model(data: bytes) -> _Model:
    """Read the content of a ``.model`` file; raises DataError if it is damaged."""
    model = _Model()
    try:
        for number, value in _fields(data):
            if not isinstance(value, bytes):
                continue
            if number == 1:
                model.pieces.append(_piece(value))
            elif number == 2:
                _read_trainer(model, value)
            elif number == 3:
                _read_normaliser(model, value)
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise DataError(f"tokenizer: the sentencepiece model is damaged: {error}") from error
    if not model.pieces:
        raise DataError("tokenizer: the sentencepiece model has no pieces")
    return model


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield number and value of each field of a message."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number = tag >> 3
        kind = tag & 7
        if kind == _VARINT:
            value, position = _varint(data, position)
            yield number, value
        elif kind == _BYTES:
            length, position = _varint(data, position)
            if length > len(data) - position:
                raise IndexError("a field is longer than the file")
            yield number, data[position : position + length]
            position += length
        elif kind in _FIXED:
            yield number, struct.unpack_from(_FIXED[kind], data, position)[0]
            position += struct.calcsize(_FIXED[kind])
        else:
            raise IndexError(f"a field has the unknown kind {kind}")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return an integer and the position behind it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise IndexError("a number has more than ten bytes")


def _piece(data: bytes) -> _Piece:
    found = dict(_fields(data))
    text = found.get(1, b"")
    score = found.get(2, 0.0)
    kind = found.get(3, TokenKind.NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, float) or not isinstance(kind, int):
        raise IndexError("a piece is damaged")
    if not 1 <= kind <= 6:
        raise IndexError(f"a piece has the unknown kind {kind}")
    return _Piece(text.decode("utf-8"), score, TokenKind(kind))


def _read_trainer(model: _Model, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 3 and isinstance(value, int):
            model.algorithm = value
        elif number == 40 and isinstance(value, int):
            model.unknown = value


def _read_normaliser(model: _Model, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 2 and isinstance(value, bytes):
            model.characters = value
        elif number == 3:
            model.prefix = bool(value)
        elif number == 4:
            model.strips = bool(value)
        elif number == 5:
            model.escapes = bool(value)
