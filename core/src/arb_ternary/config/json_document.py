"""JSON with line numbers, and without keys that stand twice."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from arb_ternary.config.document import Document
from arb_ternary.config.errors import Fault, raise_faults
from arb_ternary.config.paths import Origin, Path

__all__ = ["read_json"]

_BLANK = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"(?:\\.|[^"\\])*"')
_ATOM = re.compile(r"[^,\]}\s]+")


def read_json(text: str, source: str) -> Document:
    """Read a JSON document.

    Raises:
        InvalidConfig: ``text`` is not JSON.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        origin = Origin("file", f"{source}:{error.lineno}", error.lineno)
        raise_faults([Fault((), f"not valid JSON: {error.msg}", origin=origin)], {}, source)
    origins: dict[Path, Origin] = {}
    repeated: dict[Path, Fault] = {}
    for path, line in _Scanner(text).value(()):
        origin = Origin("file", f"{source}:{line}", line)
        if path not in origins:
            origins[path] = origin
        elif not any(path[:end] in repeated for end in range(len(path))):
            first = origins[path].order
            repeated[path] = Fault(path, f"the key is here twice; the first is in line {first}", origin=origin)
    return Document(data, source, origins, tuple(repeated.values()))


class _Scanner:
    """Walks a text that ``json`` accepts, and yields the path and line of every key, item, and of the whole."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def value(self, path: Path, line: int | None = None) -> Iterator[tuple[Path, int]]:
        opening = self._next()
        # What a key holds has the line of the key.
        yield path, self._line() if line is None else line
        if opening == "{":
            yield from self._items(path, "}")
        elif opening == "[":
            yield from self._items(path, "]")
        elif opening == '"':
            self._string()
        else:
            self._take(_ATOM)

    def _items(self, path: Path, closing: str) -> Iterator[tuple[Path, int]]:
        self.position += 1
        index = 0
        while self._next() != closing:
            if closing == "]":
                yield from self.value((*path, index))
            else:
                line = self._line()
                key = self._string()
                self._next()
                self.position += 1  # :
                yield from self.value((*path, key), line)
            index += 1
            if self._next() == ",":
                self.position += 1
        self.position += 1

    def _string(self) -> str:
        return str(json.loads(self._take(_STRING)))

    def _next(self) -> str:
        self._take(_BLANK)
        return self.text[self.position]

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.position)
        assert match is not None, f"json accepted a text that the scanner does not understand at {self.position}"
        self.position = match.end()
        return match[0]

    def _line(self) -> int:
        return self.text.count("\n", 0, self.position) + 1
