"""The metadata of a GGUF file. A value is decoded when it is asked for."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from arb_ternary.errors import DataError
from arb_ternary_interchange.gguf.cursor import Cursor
from arb_ternary_interchange.gguf.values import FORMATS, Kind

#: Most keys of a file; models have fewer than a hundred.
MAX_KEYS = 4096

#: Most strings (and arrays in arrays) of a file; the largest vocabularies and lists of merges have
#: half a million.
MAX_ITEMS = 1 << 22

#: Most levels of arrays in arrays; llama.cpp reads none.
MAX_DEPTH = 4


@frozen
class ArrayInFile:
    """An array in a file. Nothing of it is in memory until it is iterated.

    Attributes:
        kind: kind of its items.
        length: number of its items.
    """

    kind: Kind
    length: int
    _data: mmap.mmap
    _path: Path
    _start: int

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        """Yield the items: numbers, booleans, strings, or arrays."""
        if self.kind in FORMATS:
            yield from self.numbers().tolist()
            return
        cursor = Cursor(self._data, self._path, self._start)
        for i in range(self.length):
            if self.kind is Kind.STRING:
                yield cursor.text(f"item {i}")
            else:
                item = _array(cursor, "an array")
                _Walk(None).over(cursor, item, "an array")
                yield item

    def numbers(self) -> NDArray[Any]:
        """Return the numbers, a view of the file."""
        dtype = np.dtype(FORMATS[self.kind]).newbyteorder("<")
        return np.frombuffer(self._data, dtype, self.length, self._start)


class Metadata(Mapping[str, Any]):
    """Values by key: numbers, booleans, strings and :class:`ArrayInFile`.

    Everything is checked when this is made; a value is decoded each time that it is asked for.

    Args:
        cursor: a cursor at the first key; it is left behind the last value.
        count: number of keys that the file claims.

    Raises:
        DataError: a key occurs twice, or something is cut short, of an unknown kind, too many or
            too deep.
    """

    def __init__(self, cursor: Cursor, count: int) -> None:
        if count > MAX_KEYS:
            raise cursor.fail(f"the file claims {count} keys of metadata; {MAX_KEYS} are the most")
        self._data = cursor.data
        self._path = cursor.path
        self._places: dict[str, tuple[Kind, int]] = {}
        walk = _Walk(MAX_ITEMS)
        for i in range(count):
            start = cursor.position
            key = cursor.text(f"key {i} of the metadata")
            if key in self._places:
                cursor.position = start
                raise cursor.fail(f"the key {key!r} occurs twice")
            kind = cursor.kind(f"the value of {key!r}")
            self._places[key] = (kind, cursor.position)
            walk.over_value(cursor, kind, f"the value of {key!r}")

    def __getitem__(self, key: str) -> Any:
        kind, start = self._places[key]
        cursor = Cursor(self._data, self._path, start)
        if kind is Kind.STRING:
            return cursor.text(key)
        if kind is Kind.ARRAY:
            return _array(cursor, key)
        return cursor.number(kind, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def kind(self, key: str) -> Kind:
        """Return the kind of the value of ``key``."""
        return self._places[key][0]

    def one(self, key: str, type_: type[Any], default: Any = None) -> Any:
        """Return the value of ``key``, which has to be of ``type_`` (an integer counts as a float).

        Raises:
            DataError: it is of another type, or there is none and no default.
        """
        if key not in self._places:
            if default is None:
                raise DataError(
                    f"{self._path}: the metadata have no {key!r}", "The file is not a whole model."
                )
            return default
        value = self[key]
        if type_ is float and type(value) is int:
            return float(value)
        if type(value) is not type_:
            raise DataError(
                f"{self._path}: {key!r} is of kind {self.kind(key).name.lower()}, which is not "
                f"{type_.__name__}"
            )
        return value


class _Walk:
    """Steps over values without keeping them.

    Args:
        budget: most strings and inner arrays that are stepped over; None = any number, in a file
            that was checked before.
    """

    def __init__(self, budget: int | None) -> None:
        self._left = budget

    def over_value(self, cursor: Cursor, kind: Kind, what: str) -> None:
        if kind is Kind.STRING:
            cursor.check_string(what)
        elif kind is Kind.ARRAY:
            self.over(cursor, _array(cursor, what), what)
        else:
            cursor.number(kind, what)

    def over(self, cursor: Cursor, array: ArrayInFile, what: str, depth: int = 1) -> None:
        """Step over the items of ``array``; ``cursor`` is at the first of them."""
        if array.kind in FORMATS:
            self._over_numbers(cursor, array, what)
            return
        self._spend(cursor, array.length, what)
        if depth == MAX_DEPTH and array.kind is Kind.ARRAY:
            raise cursor.fail(f"{what} has arrays in arrays deeper than {MAX_DEPTH}")
        if array.kind is Kind.STRING:
            cursor.check_strings(array.length, what)
            return
        for i in range(array.length):
            inner = f"item {i} of {what}"
            self.over(cursor, _array(cursor, inner), inner, depth + 1)

    def _over_numbers(self, cursor: Cursor, array: ArrayInFile, what: str) -> None:
        itemsize = np.dtype(FORMATS[array.kind]).itemsize
        start = cursor.skip(array.length * itemsize, f"{what}, {array.length} items,")
        if array.kind is not Kind.BOOL or not array.length:
            return
        if np.frombuffer(cursor.data, np.uint8, array.length, start).max() > 1:
            cursor.position = start
            raise cursor.fail(f"{what} has a boolean that is neither 0 nor 1")

    def _spend(self, cursor: Cursor, count: int, what: str) -> None:
        if self._left is None:
            return
        if count > self._left or count > (len(cursor.data) - cursor.position) // 8:
            raise cursor.fail(
                f"{what} claims {count} items, more than the file can hold ({MAX_ITEMS} are the "
                f"most)"
            )
        self._left -= count


def _array(cursor: Cursor, what: str) -> ArrayInFile:
    """Read the kind of items and the length of an array; ``cursor`` is left at its first item."""
    kind = cursor.kind(f"the items of {what}")
    length = cursor.u64(f"the length of {what}")
    return ArrayInFile(kind, length, cursor.data, cursor.path, cursor.position)
