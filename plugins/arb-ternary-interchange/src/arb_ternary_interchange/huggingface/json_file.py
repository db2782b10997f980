"""JSON files of a model folder: read within a bound, and their values taken with type and range
checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from arb_ternary.errors import DataError

#: Largest ``config.json`` and its like; those of published models have a few thousand bytes.
MAX_CONFIG_BYTES: Final = 1 << 20

_MISSING: Final = object()


def read_text(path: Path, limit: int) -> str:
    """The text of a file of at most ``limit`` bytes.

    Raises:
        DataError: the file is missing, larger, or not UTF-8.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            # memory is taken for as much as is asked for
            content = file.read(size) if size <= limit else b""
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if size > limit:
        raise DataError(f"{path}: is larger than {limit} bytes, which no such file is")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: is not UTF-8: byte {error.start} is {content[error.start]:#04x}"
        ) from error


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object in ``text``; a key may stand there once only.

    Raises:
        DataError: it is no JSON, or no object; ``where`` comes first.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = next(
                one for one, other in pairwise(sorted(key for key, _ in pairs)) if one == other
            )
            raise DataError(f"{where}: the key {twice[:120]!r} stands there twice")
        return found

    try:
        found = json.loads(text, object_pairs_hook=unique)
    # of the UTF-8 decoder, the parser, and nested too deeply for it
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is not JSON: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise DataError(f"{where}: holds a JSON {type(found).__name__}, not an object")
    return found


def read_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file of at most ``limit`` bytes; DataError when there is none."""
    return parse_object(read_text(path, limit), str(path))


@frozen
class Values:
    """The values of a JSON object; each fault is a DataError that names file and key.

    Attributes:
        where: the file, and the way to the object in it.
        found: the object.
    """

    where: str
    found: Mapping[str, Any]

    def __contains__(self, key: str) -> bool:
        return self.found.get(key) is not None

    def wrong(self, key: str, rule: str, hint: str = "") -> DataError:
        """The error of a value that breaks ``rule``, which completes "must be ..."."""
        value = self.found.get(key, "missing") if key in self.found else "missing"
        shown = value if value == "missing" else repr(value)[:80]
        return DataError(f"{self.where}: {key!r} must be {rule}; it is {shown}", hint)

    def integer(self, key: str, low: int, high: int, default: Any = _MISSING) -> int:
        """A whole number from ``low`` to ``high``; null and nothing give ``default``, if there is
        one.
        """
        value = self._value(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: Any = _MISSING) -> float:
        """A number from ``low`` to ``high``."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.wrong(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, key: str, default: Any = _MISSING) -> bool:
        """True or false."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def word(self, key: str, known: Sequence[str], default: Any = _MISSING, hint: str = "") -> str:
        """One of the words ``known``."""
        value = self._value(key, default)
        if type(value) is not str or value not in known:
            raise self.wrong(key, f"one of {', '.join(known)}", hint)
        return value

    def words(self, key: str) -> tuple[str, ...] | None:
        """A list of strings; None when it is null or not there."""
        value = self.found.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(word) is str for word in value):
            raise self.wrong(key, "a list of strings")
        return tuple(value)

    def numbers(self, key: str, count: int, low: float, high: float) -> tuple[float, ...]:
        """A list of ``count`` numbers from ``low`` to ``high``."""
        value = self.found.get(key)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(type(number) in (int, float) and low <= number <= high for number in value)
        ):
            raise self.wrong(key, f"a list of {count} numbers from {low:g} to {high:g}")
        return tuple(float(number) for number in value)

    def within(self, key: str) -> Values | None:
        """The object under a key; None when it is null or not there."""
        value = self.found.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Values(f"{self.where}: {key!r}", value)

    def _value(self, key: str, default: Any) -> Any:
        value = self.found.get(key)
        if value is None and default is not _MISSING:
            return default
        return value
