"""JSON files of a model folder: read within a limit, their values checked for type and range."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from arb_ternary.errors import DataError

#: Largest ``config.json`` and its like; those of published models have a few thousand bytes.
MAX_CONFIG_BYTES: Final = 1 << 20

#: An escape of half of a surrogate pair.
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_MISSING: Final = object()


def read_text(path: Path, limit: int) -> str:
    """Return the text of a file of at most ``limit`` bytes.

    Raises:
        DataError: the file cannot be read, is larger, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            # Not ``read(limit)``: that allocates as many bytes as it is asked for.
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


def read_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of at most ``limit`` bytes, in which no key occurs twice.

    Raises:
        DataError: the file cannot be read, or holds no such object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise DataError(f"{path}: the key {key[:120]!r} occurs twice")
            found[key] = value
        return found

    text = read_text(path, limit)
    try:
        found = json.loads(text, object_pairs_hook=unique)
        if _SURROGATE.search(text):
            # Half of a pair is no character, and nothing can print or open it.
            json.dumps(found, ensure_ascii=False).encode()
    # ValueError: the parser's and the encoder's; RecursionError: nested too deeply for it.
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: holds a JSON {type(found).__name__}, not an object")
    return found


@frozen
class Values:
    """The values of a JSON object. Each method raises DataError, with file and key, for a value
    that is not as asked for; null and a missing key give the default, if there is one.

    Attributes:
        where: the file, and the path to the object in it.
        found: the object.
        looked_at: keys that one of the methods was asked for.
        inner: objects in the object that were asked for, by key.
    """

    where: str
    found: Mapping[str, Any]
    looked_at: set[str] = field(factory=set, eq=False, repr=False)
    inner: dict[str, Values] = field(factory=dict, eq=False, repr=False)

    def __contains__(self, key: str) -> bool:
        return self._get(key) is not None

    def unused(self) -> dict[str, Any]:
        """Return what no method was asked for, except for null: values by key. A key of an inner
        object is written ``outer.inner``.
        """
        nulls = {key for key, value in self.found.items() if value is None}
        seen = self.looked_at | nulls
        left = {key: value for key, value in self.found.items() if key not in seen}
        for key, values in self.inner.items():
            left |= {f"{key}.{name}": value for name, value in values.unused().items()}
        return left

    def wrong(self, key: str, rule: str, hint: str = "") -> DataError:
        """Return the error of a value that breaks ``rule``, which completes "must be ..."."""
        shown = repr(self.found[key])[:80] if key in self.found else "missing"
        return DataError(f"{self.where}: {key!r} must be {rule}; it is {shown}", hint)

    def integer(self, key: str, low: int, high: int, default: Any = _MISSING) -> int:
        """Return an integer from ``low`` to ``high``."""
        value = self._value(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: Any = _MISSING) -> float:
        """Return a number from ``low`` to ``high``."""
        value = self._value(key, default)
        if not _is_number(value, low, high):
            raise self.wrong(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, key: str, default: Any = _MISSING) -> bool:
        """Return true or false."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def word(self, key: str, known: Sequence[str], default: Any = _MISSING, hint: str = "") -> str:
        """Return one of the words ``known``."""
        value = self._value(key, default)
        if type(value) is not str or value not in known:
            raise self.wrong(key, f"one of {', '.join(known)}", hint)
        return value

    def words(self, key: str) -> tuple[str, ...] | None:
        """Return a list of strings; None if there is none."""
        value = self._get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(word) is str for word in value):
            raise self.wrong(key, "a list of strings")
        return tuple(value)

    def numbers(self, key: str, count: int, low: float, high: float) -> tuple[float, ...]:
        """Return a list of ``count`` numbers from ``low`` to ``high``."""
        value = self._get(key)
        rule = f"a list of {count} numbers from {low:g} to {high:g}"
        if not isinstance(value, list) or len(value) != count:
            raise self.wrong(key, rule)
        if not all(_is_number(number, low, high) for number in value):
            raise self.wrong(key, rule)
        return tuple(float(number) for number in value)

    def within(self, key: str) -> Values | None:
        """Return the object under a key; None if there is none."""
        value = self._get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        if key not in self.inner:
            self.inner[key] = Values(f"{self.where}: {key!r}", value)
        return self.inner[key]

    def text(self, key: str) -> str | None:
        """Return a string; None if there is none."""
        value = self._get(key)
        if value is not None and type(value) is not str:
            raise self.wrong(key, "a string")
        return value

    def _get(self, key: str) -> Any:
        self.looked_at.add(key)
        return self.found.get(key)

    def _value(self, key: str, default: Any) -> Any:
        value = self._get(key)
        if value is None and default is not _MISSING:
            return default
        return value


def _is_number(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high
