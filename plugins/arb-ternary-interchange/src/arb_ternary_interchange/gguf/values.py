"""Values of a GGUF file's metadata: their kinds, and their bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final

from attrs import frozen

from arb_ternary.errors import DataError


class Kind(IntEnum):
    """Kind of a value, by the number that stands in a file."""

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


# : Of each kind of number, its letter for ``struct`` and numpy. Numbers are little-endian, a
# boolean is a byte 0 or 1.
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
    """Values of one kind; of ``Kind.ARRAY`` each item is an :class:`Array`."""

    kind: Kind
    items: Sequence[Any]


Value = Scalar | Array


def encode_string(text: str) -> bytes:
    """Length (uint64) and UTF-8 bytes; DataError for half of a surrogate pair."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{text!r} has no UTF-8 form, so that a GGUF file cannot hold it"
        ) from error
    return struct.pack("<Q", len(data)) + data


def encode(value: Value) -> bytes:
    """A value as it stands in a file, its kind first; DataError for a number that its kind cannot
    hold.
    """
    if isinstance(value, Array):
        return struct.pack("<I", Kind.ARRAY) + _items(value)
    if value.kind is Kind.STRING:
        return struct.pack("<I", Kind.STRING) + encode_string(value.value)
    return struct.pack("<I", value.kind) + _numbers(value.kind, [value.value])


def _items(array: Array) -> bytes:
    head = struct.pack("<IQ", array.kind, len(array.items))
    if array.kind is Kind.ARRAY:
        return head + b"".join(_items(item) for item in array.items)
    if array.kind is Kind.STRING:
        return head + b"".join(encode_string(item) for item in array.items)
    return head + _numbers(array.kind, array.items)


def _numbers(kind: Kind, numbers: Sequence[Any]) -> bytes:
    try:
        return struct.pack(f"<{len(numbers)}{FORMATS[kind]}", *numbers)
    except (struct.error, OverflowError) as error:
        raise DataError(
            f"a GGUF value of kind {kind.name.lower()} cannot hold this: {error}"
        ) from error
