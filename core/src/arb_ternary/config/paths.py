"""Paths into a config tree and where its values came from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

from attrs import frozen

__all__ = ["DEFAULT", "Origin", "Path", "find_origin", "parse_path", "show_path"]

#: Keys and list indices from the root of a config to a value.
Path: TypeAlias = tuple[str | int, ...]

_SEGMENT = re.compile(r'\[(?P<index>\d+)\]|\.?"(?P<quoted>[^"]*)"|\.?(?P<plain>[^.\[\]"=]+)')


@frozen
class Origin:
    """Where a value came from.

    Attributes:
        kind: ``whole`` is a file without lines, ``derived`` a value that follows from another one that the user wrote.
        text: ``demo.yaml:12``, ``-o seed=3``, the environment variable, or ``default``.
        order: line in the file, or position among the overrides: errors are listed in this order.
    """

    kind: Literal["whole", "file", "override", "environment", "derived", "default"]
    text: str
    order: int = 0

    def __str__(self) -> str:
        return self.text


DEFAULT = Origin("default", "default")


def show_path(path: Path) -> str:
    """``("phases", 0, "steps")`` as ``phases[0].steps``; a key with a dot is quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (f'"{part}"' if re.search(r"[.\[\]=]", part) else part)
    return text


def parse_path(text: str) -> Path | None:
    """The inverse of :func:`show_path`; ``phases.0.steps`` works too (the index stays text). None when malformed."""
    parts: list[str | int] = []
    position = 0
    while position < len(text):
        match = _SEGMENT.match(text, position)
        if match is None or (position == 0 and text.startswith(".")):
            return None
        if position > 0 and match["index"] is None and text[position] != ".":
            return None
        if match["index"] is not None:
            parts.append(int(match["index"]))
        else:
            parts.append(match["quoted"] if match["quoted"] is not None else match["plain"].strip())
        position = match.end()
    return tuple(parts) if parts and "" not in parts else None


def find_origin(origins: Mapping[Path, Origin], path: Path) -> Origin | None:
    """The origin of the value at ``path``, or of the nearest enclosing value that has one."""
    enclosing = (path[:end] for end in range(len(path), -1, -1))
    return next((origins[each] for each in enclosing if each in origins), None)
