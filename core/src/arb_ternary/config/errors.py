"""Paths into a config, where its values come from, and its faults, which are raised together."""

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
    """The source of a value.

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
    """Return ``("phases", 0, "steps")`` as ``phases[0].steps``; a key with a dot is quoted."""
    shown = ""
    for part in path:
        if isinstance(part, int):
            shown += f"[{part}]"
        elif re.search(r"[.\[\]=]", part):
            shown += f'."{part}"'
        else:
            shown += f".{part}"
    return shown.removeprefix(".")


def find_origin(origins: Mapping[Path, Origin], path: Path) -> Origin | None:
    """Return the origin of the value at ``path``, or of the nearest value around it with one."""
    for end in range(len(path), -1, -1):
        if path[:end] in origins:
            return origins[path[:end]]
    return None


@frozen
class Fault:
    """One thing that is wrong; as text, ``where: path: message`` without the unknown parts.

    Attributes:
        path: the path of the value.
        message: what is wrong with it.
        hint: what to do about it, if the message does not say.
        origin: overrides the location that ``path`` implies.
        environment: the config may be right; something that it names is not installed or failed to
            load.
        unknown_component: the name of a component is not registered.
    """

    path: Path
    message: str
    hint: str = ""
    origin: Origin | None = None
    environment: bool = False
    unknown_component: bool = False

    def __str__(self) -> str:
        parts = (str(self.origin or ""), show_path(self.path), self.message)
        return ": ".join(filter(None, parts))

    def to_json(self) -> dict[str, str]:
        """The fault as a JSON object."""
        where = str(self.origin or "")
        path = show_path(self.path)
        return {"where": where, "path": path, "message": self.message, "hint": self.hint}


class Faulty(ValueError):
    """Faults found below some point of a config, with paths relative to that point."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("; ".join(fault.message for fault in faults))
        self.faults = faults


def raise_faults(faults: Iterable[Fault], origins: Mapping[Path, Origin], source: str) -> NoReturn:
    """Raise all faults as one error, in the order of lines.

    Raises:
        EnvironmentProblem: every fault lies in the environment.
        ConfigError: at least one lies in the config.
    """
    whole = Origin("file", source)
    located: dict[Fault, tuple[int, int]] = {}  # each fault once, with its place in the order
    for fault in faults:
        origin = fault.origin or find_origin(origins, fault.path) or whole
        complete = evolve(fault, origin=origin)
        located[complete] = (_ORDER.index(origin.kind), origin.order)
    ordered = sorted(located, key=lambda fault: located[fault])

    lines = [str(fault) for fault in ordered]
    if len(lines) > 1:
        count = f"{len(lines)} faults"
        lines.insert(0, f"{source}: {count}" if source else count)
    hints = dict.fromkeys(fault.hint for fault in ordered if fault.hint)
    in_environment = all(fault.environment for fault in ordered)
    kind = EnvironmentProblem if in_environment else ConfigError
    error = kind("\n".join(lines), "\n".join(hints))
    error.faults = ordered
    raise error
