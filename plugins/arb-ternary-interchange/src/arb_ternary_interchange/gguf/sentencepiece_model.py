"""The file of a sentencepiece tokenizer, as far as llama.cpp needs it.

https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto describes it: a
message of protocol buffers, of which a few fields are read here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from attrs import define, field

from arb_ternary.errors import DataError

UNIGRAM: Final = 1
BPE: Final = 2

_VARINT = 0
_EIGHT_BYTES = 1
_BYTES = 2
_FOUR_BYTES = 5


@define
class SentencePieceModel:
    """A tokenizer of sentencepiece.

    Attributes:
        pieces: text, score and kind (by llama.cpp's numbers, which are sentencepiece's) of each id.
        algorithm: :data:`UNIGRAM` or :data:`BPE`; others are by words and characters.
        unknown: id of what no piece is for.
        characters: the table by which characters are replaced first, compiled.
        prefix: whether a space is put before a text.
        strips: whether spaces at the ends and runs of them are dropped.
        escapes: whether spaces become U+2581.
    """

    pieces: list[tuple[str, float, int]] = field(factory=list)
    algorithm: int = UNIGRAM
    unknown: int = 0
    characters: bytes = b""
    prefix: bool = True
    strips: bool = True
    escapes: bool = True


def read_model(data: bytes) -> SentencePieceModel:
    """Read the content of a ``.model`` file.

    Raises:
        DataError: it is not one.
    """
    model = SentencePieceModel()
    try:
        for number, value in _fields(data):
            if number == 1 and isinstance(value, bytes):
                model.pieces.append(_piece(value))
            elif number == 2 and isinstance(value, bytes):
                _trainer(model, value)
            elif number == 3 and isinstance(value, bytes):
                _normaliser(model, value)
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise DataError(f"tokenizer: the sentencepiece model is damaged: {error}") from error
    if not model.pieces:
        raise DataError("tokenizer: the sentencepiece model has no pieces")
    return model


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Number and value of each field of a message."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == _VARINT:
            value, position = _varint(data, position)
            yield tag >> 3, value
        elif kind == _BYTES:
            length, position = _varint(data, position)
            if length > len(data) - position:
                raise IndexError("a field is longer than the file")
            yield tag >> 3, data[position : position + length]
            position += length
        elif kind == _FOUR_BYTES:
            yield tag >> 3, struct.unpack_from("<f", data, position)[0]
            position += 4
        elif kind == _EIGHT_BYTES:
            yield tag >> 3, struct.unpack_from("<d", data, position)[0]
            position += 8
        else:
            raise IndexError(f"a field has the unknown kind {kind}")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise IndexError("a number has more than ten bytes")


def _piece(data: bytes) -> tuple[str, float, int]:
    found = {1: b"", 2: 0.0, 3: 1, **dict(_fields(data))}
    text = found[1]
    score = found[2]
    kind = found[3]
    if (
        not isinstance(text, bytes)
        or not isinstance(score, float)
        or not isinstance(kind, int)
        or not 1 <= kind <= 6
    ):
        raise IndexError("a piece is not one")
    return text.decode("utf-8"), score, kind


def _trainer(model: SentencePieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 3 and isinstance(value, int):
            model.algorithm = value
        elif number == 40 and isinstance(value, int):
            model.unknown = value


def _normaliser(model: SentencePieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 2 and isinstance(value, bytes):
            model.characters = value
        elif number == 3:
            model.prefix = bool(value)
        elif number == 4:
            model.strips = bool(value)
        elif number == 5:
            model.escapes = bool(value)
