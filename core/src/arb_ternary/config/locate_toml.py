"""The line of every key in a TOML text; ``tomllib`` gives values only."""

from __future__ import annotations

import re
import tomllib

from arb_ternary.config.paths import Path

__all__ = ["locate_keys"]

_SPACE = re.compile(r"[ \t]*")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
#: The four kinds of string; multi-line ones may end in up to two further quotes.
_STRING = re.compile(r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\])*"|\'[^\']*\'', re.DOTALL)
_ATOM = re.compile(r"[^,\]}#\r\n]+")


def locate_keys(text: str) -> dict[Path, int]:
    """Lines (from 1) of keys, tables and list items, by path. ``text`` must be TOML that ``tomllib`` accepts."""
    return _Scanner(text).document()


class _Scanner:
    """Walks the text once. It relies on its validity and checks nothing."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.lines: dict[Path, int] = {}
        self.tables: dict[Path, int] = {}

    def document(self) -> dict[Path, int]:
        table: Path = ()
        while True:
            self._skip(_BLANK)
            if self.position >= len(self.text):
                return self.lines
            if self._peek("["):
                table = self._header()
            else:
                self._pair(table)

    def _header(self) -> Path:
        line = self._line()
        is_array = self._peek("[[")
        self.position += 2 if is_array else 1
        keys = self._keys()
        self.position += 2 if is_array else 1
        path: Path = ()
        for position, key in enumerate(keys):
            path = (*path, key)
            self.lines.setdefault(path, line)
            if is_array and position == len(keys) - 1:
                self.tables[path] = self.tables.get(path, 0) + 1
            if path in self.tables:
                # A header that passes through an array of tables means its last table.
                path = (*path, self.tables[path] - 1)
                self.lines.setdefault(path, line)
        return path

    def _pair(self, table: Path) -> None:
        line = self._line()
        path = table
        for key in self._keys():
            path = (*path, key)
            self.lines.setdefault(path, line)
        self.position += 1  # =
        self._value(path)

    def _keys(self) -> list[str]:
        keys = []
        while True:
            self._skip(_SPACE)
            if self.text[self.position] in "\"'":
                raw = self._take(_STRING)
                keys.append(str(tomllib.loads(f"key = {raw}")["key"]))
            else:
                keys.append(self._take(_BARE_KEY))
            self._skip(_SPACE)
            if not self._peek("."):
                return keys
            self.position += 1

    def _value(self, path: Path) -> None:
        self._skip(_SPACE)
        if self._peek("["):
            self._array(path)
        elif self._peek("{"):
            self._inline_table(path)
        elif self.text[self.position] in "\"'":
            self._take(_STRING)
        else:
            self._take(_ATOM)

    def _array(self, path: Path) -> None:
        self.position += 1
        index = 0
        while True:
            self._skip(_BLANK)
            if self._peek("]"):
                self.position += 1
                return
            self.lines[(*path, index)] = self._line()
            self._value((*path, index))
            index += 1
            self._skip(_BLANK)
            if self._peek(","):
                self.position += 1

    def _inline_table(self, path: Path) -> None:
        self.position += 1
        while True:
            self._skip(_BLANK)
            if self._peek("}"):
                self.position += 1
                return
            self._pair(path)
            self._skip(_BLANK)
            if self._peek(","):
                self.position += 1

    def _peek(self, token: str) -> bool:
        return self.text.startswith(token, self.position)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        self._take(pattern)

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.position)
        assert match is not None, f"tomllib accepted a text that the scanner does not understand at {self.position}"
        self.position = match.end()
        return match[0]

    def _line(self) -> int:
        return self.text.count("\n", 0, self.position) + 1
