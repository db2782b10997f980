"""The ``.model`` files of sentencepiece.

https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto describes them: a
message of protocol buffers. Only a few of its fields are read here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from attrs import define, field

from arb_ternary.errors import DataError
from arb_ternary_interchange.gguf.tokens import TokenKind

#: Algorithms of a model; others split into words or characters.
UNIGRAM: Final = 1
BPE: Final = 2

#: Fields of the trainer's part that are ids of pieces, by their role.
_ROLES: Final = {40: "unk", 41: "bos", 42: "eos", 43: "pad"}

#: Kinds of fields of a message, with the ``struct`` format of the fixed-size ones.
_VARINT: Final = 0
_BYTES: Final = 2
_FIXED: Final = {1: "<d", 5: "<f"}


@define
class Piece:
    """A piece of a sentencepiece model: text, score and kind."""

    text: str
    score: float
    kind: TokenKind


@define
class SentencePieceModel:
    """A sentencepiece model.

    Attributes:
        pieces: piece of each id.
        algorithm: :data:`UNIGRAM`, :data:`BPE`, or another.
        roles: id of the pieces ``unk``, ``bos``, ``eos`` and ``pad``; negative if there is none.
        table: name of the rules by which characters are replaced first.
        characters: these rules, compiled.
        prefix: whether a space is put before a text.
        strips: whether spaces at the ends and runs of them are dropped.
        escapes: whether spaces become U+2581.
    """

    pieces: list[Piece] = field(factory=list)
    algorithm: int = UNIGRAM
    roles: dict[str, int] = field(factory=lambda: {"unk": 0, "bos": 1, "eos": 2, "pad": -1})
    table: str = ""
    characters: bytes = b""
    prefix: bool = True
    strips: bool = True
    escapes: bool = True

    def has_kind(self, kind: TokenKind) -> bool:
        """Whether a piece is of ``kind``."""
        return any(piece.kind == kind for piece in self.pieces)


def read_model(data: bytes) -> SentencePieceModel:
    """Read the content of a ``.model`` file; raises DataError if it is damaged."""
    model = SentencePieceModel()
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


def _piece(data: bytes) -> Piece:
    found = dict(_fields(data))
    text = found.get(1, b"")
    score = found.get(2, 0.0)
    kind = found.get(3, TokenKind.NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, float) or not isinstance(kind, int):
        raise IndexError("a piece is damaged")
    if not 1 <= kind <= 6:
        raise IndexError(f"a piece has the unknown kind {kind}")
    return Piece(text.decode("utf-8"), score, TokenKind(kind))


def _read_trainer(model: SentencePieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 3 and isinstance(value, int):
            model.algorithm = value
        elif number in _ROLES and isinstance(value, int):
            # A negative number is written as its two's complement in 64 bits.
            model.roles[_ROLES[number]] = value - (1 << 64) if value >> 63 else value


def _read_normaliser(model: SentencePieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            model.table = value.decode("utf-8")
        elif number == 2 and isinstance(value, bytes):
            model.characters = value
        elif number == 3:
            model.prefix = bool(value)
        elif number == 4:
            model.strips = bool(value)
        elif number == 5:
            model.escapes = bool(value)
