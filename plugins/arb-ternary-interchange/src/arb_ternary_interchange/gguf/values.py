"""The values in the metadata of a GGUF file: their kinds and their bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final

from attrs import frozen

from arb_ternary.errors import DataError


class Kind(IntEnum):
    """Kind of a value, by its number in a file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


#: The letter of each kind of number for ``struct`` and numpy. Numbers are little-endian, a boolean
#: is a byte 0 or 1.
FORMATS: Final = {
    Kind.UINT8: "B",
    Kind.INT8: "b",
    Kind.UINT16: "H",
    Kind.INT16: "h",
    Kind.UINT32: "I",
    Kind.INT32: "i",
    Kind.FLOAT32: "f",
    Kind.BOOL: "?",
    Kind.UINT64: "Q",
    Kind.INT64: "q",
    Kind.FLOAT64: "d",
}


@frozen
class Scalar:
    """One value: a number, a boolean or a string."""

    kind: Kind
    value: Any


@frozen
class Array:
    """Values of one kind; if that is ``Kind.ARRAY``, each item is an :class:`Array`."""

    kind: Kind
    items: Sequence[Any]


Value = Scalar | Array


def encode_string(text: str) -> bytes:
    """Return the length (uint64) and the UTF-8 bytes of a string; raises DataError for half of a
    surrogate pair.
    """
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{text!r} has no UTF-8 form, so that a GGUF file cannot hold it"
        ) from error
    return struct.pack("<Q", len(data)) + data


def encode(value: Value) -> bytes:
    """Return a value as it stands in a file, its kind first; raises DataError for a number that
    its kind cannot hold.
    """
    if isinstance(value, Array):
        return struct.pack("<I", Kind.ARRAY) + _items(value)
    return struct.pack("<I", value.kind) + _sequence(value.kind, [value.value])


def _items(array: Array) -> bytes:
    return struct.pack("<IQ", array.kind, len(array.items)) + _sequence(array.kind, array.items)


def _sequence(kind: Kind, items: Sequence[Any]) -> bytes:
    if kind is Kind.ARRAY:
        return b"".join(_items(item) for item in items)
    if kind is Kind.STRING:
        return b"".join(encode_string(item) for item in items)
    try:
        return struct.pack(f"<{len(items)}{FORMATS[kind]}", *items)
    except (struct.error, OverflowError) as error:
        raise DataError(
            f"a GGUF value of kind {kind.name.lower()} cannot hold this: {error}"
        ) from error
