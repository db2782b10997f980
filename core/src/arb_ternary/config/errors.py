"""Paths into a config, where its values come from, and what is wrong with them: all at once,
located, as one error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, NoReturn, TypeAlias

from attrs import evolve, frozen

from arb_ternary.errors import ConfigError, EnvironmentProblem

#: Keys and list indices from the root of a config to a value.
Path: TypeAlias = tuple[str | int, ...]
#: The order in which faults are listed.
_ORDER = ("file", "override", "environment", "derived", "default")


@frozen
class Origin:
    """Where a value came from.

    Attributes:
        kind: ``derived`` is a value that follows from another one that the user wrote.
        text: ``demo.yaml:12``, ``-o seed=3``, the environment variable, or ``default``.
        order: line in the file (0 is the file as a whole), or position among the overrides.
    """

    kind: Literal["file", "override", "environment", "derived", "default"]
    text: str
    order: int = 0

    def __str__(self) -> str:
        return self.text


def show_path(path: Path) -> str:
    """``("phases", 0, "steps")`` as ``phases[0].steps``; a key with a dot is quoted."""
    quoted = (
        f'"{part}"' if isinstance(part, str) and re.search(r"[.\[\]=]", part) else part
        for part in path
    )
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in quoted
    ).removeprefix(".")


def find_origin(origins: Mapping[Path, Origin], path: Path) -> Origin | None:
    """The origin of the value at ``path``, or of the nearest enclosing value that has one."""
    enclosing = (path[:end] for end in range(len(path), -1, -1))
    return next((origins[each] for each in enclosing if each in origins), None)


@frozen
class Fault:
    """One thing that is wrong; as text, ``where: path: message`` without the parts that are
    unknown.

    Attributes:
        hint: what to do about it, when the message does not say.
        origin: overrides the location that ``path`` implies.
        environment: the config may be right; something that it names is not installed or failed to
            load.
        unknown_component: a component's name is not registered.
    """

    path: Path
    message: str
    hint: str = ""
    origin: Origin | None = None
    environment: bool = False
    unknown_component: bool = False

    def __str__(self) -> str:
        return ": ".join(
            part for part in (str(self.origin or ""), show_path(self.path), self.message) if part
        )

    def to_json(self) -> dict[str, str]:
        """The fault as a JSON object."""
        where = str(self.origin or "")
        path = show_path(self.path)
        return {"where": where, "path": path, "message": self.message, "hint": self.hint}


class Faulty(ValueError):
    """Faults found below some point of the tree, with paths relative to it."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("; ".join(fault.message for fault in faults))
        self.faults = faults


def raise_faults(faults: Iterable[Fault], origins: Mapping[Path, Origin], source: str) -> NoReturn:
    """Raise every fault as one ConfigError, in the order of lines; as an EnvironmentProblem when
    all lie there.
    """
    whole = Origin("file", source)
    placed = (
        evolve(each, origin=each.origin or find_origin(origins, each.path) or whole)
        for each in faults
    )
    located = sorted(
        dict.fromkeys(placed),
        key=lambda fault: (
            (_ORDER.index(fault.origin.kind), fault.origin.order) if fault.origin else (0, 0)
        ),
    )
    lines = [str(fault) for fault in located]
    if len(lines) > 1:
        lines.insert(0, ": ".join(part for part in (source, f"{len(lines)} faults") if part))
    hint = "\n".join(dict.fromkeys(fault.hint for fault in located if fault.hint))
    in_environment = all(fault.environment for fault in located)
    error = (EnvironmentProblem if in_environment else ConfigError)("\n".join(lines), hint)
    error.faults = located
    raise error
