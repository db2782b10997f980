"""Faults of a config: collected all at once, located, and raised as one error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from attrs import evolve, frozen

from arb_ternary.config.paths import Origin, Path, find_origin, show_path
from arb_ternary.errors import ConfigError, EnvironmentProblem

__all__ = ["ConfigEnvironmentProblem", "Fault", "Faulty", "InvalidConfig", "LocatedFault", "locate", "raise_faults"]


@frozen
class Fault:
    """One thing that is wrong.

    Attributes:
        path: where, from the root of the config.
        message: what, without the path.
        hint: what to do about it, when the message does not say.
        also: paths whose location the message ends with, for a contradiction between two places.
        origin: overrides the location that ``path`` implies.
        environment: the config may be right; something that it names is not installed or failed to load.
        unknown_component: a component's name is not registered.
    """

    path: Path
    message: str
    hint: str = ""
    also: tuple[Path, ...] = ()
    origin: Origin | None = None
    environment: bool = False
    unknown_component: bool = False


class Faulty(Exception):
    """Faults found below some point of the tree, with paths relative to it."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(fault.message for fault in faults))
        self.faults = tuple(faults)

    @classmethod
    def here(cls, message: str, hint: str = "") -> Faulty:
        """One fault at this very point."""
        return cls([Fault((), message, hint)])

    def under(self, key: str | int) -> list[Fault]:
        """The faults as seen from the enclosing value, in which this one has the key ``key``."""
        return [
            evolve(fault, path=(key, *fault.path), also=tuple((key, *path) for path in fault.also))
            for fault in self.faults
        ]


@frozen
class LocatedFault:
    """A fault as it is printed: ``where: path: message``; the parts that are unknown are empty."""

    where: str
    path: str
    message: str
    hint: str
    environment: bool

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.path, self.message) if part)

    def to_json(self) -> dict[str, Any]:
        """The fault as a JSON object."""
        return {"where": self.where, "path": self.path, "message": self.message, "hint": self.hint}


class InvalidConfig(ConfigError):
    """A config with faults, one line each."""

    def __init__(self, what: str, hint: str, faults: Sequence[LocatedFault]) -> None:
        super().__init__(what, hint)
        self.faults = tuple(faults)


class ConfigEnvironmentProblem(EnvironmentProblem):
    """A config without faults of its own that names what this environment does not have."""

    def __init__(self, what: str, hint: str, faults: Sequence[LocatedFault]) -> None:
        super().__init__(what, hint)
        self.faults = tuple(faults)


def locate(faults: Iterable[Fault], origins: Mapping[Path, Origin], source: str) -> list[LocatedFault]:
    """Faults in the order of the file's lines, then of the overrides, each once."""
    kinds = ("file", "override", "environment", "derived", "default")
    keyed: list[tuple[tuple[int, int], LocatedFault]] = []
    for fault in faults:
        origin = fault.origin or find_origin(origins, fault.path)
        message = fault.message
        others = [str(found) for path in fault.also if (found := find_origin(origins, path)) is not None]
        if others:
            message += f" ({', '.join(others)})"
        where = str(origin) if origin is not None else source
        located = LocatedFault(where, show_path(fault.path), message, fault.hint, fault.environment)
        order = (kinds.index(origin.kind), origin.order) if origin is not None else (-1, 0)
        keyed.append((order, located))
    keyed.sort(key=lambda pair: pair[0])
    return list(dict.fromkeys(located for _, located in keyed))


def raise_faults(faults: Sequence[Fault], origins: Mapping[Path, Origin], source: str) -> NoReturn:
    """Raise every fault as one error.

    The config is what is wrong as soon as one fault is its own. Only when all of them lie in the environment is it an
    environment problem; unknown components count as a consequence of a missing requirement and are then left out.

    Raises:
        InvalidConfig: exit code 2.
        ConfigEnvironmentProblem: exit code 3.
    """
    environment = [fault for fault in faults if fault.environment]
    unmet = any(fault.path[:1] == ("requires",) for fault in environment)
    own = [fault for fault in faults if not fault.environment and not (unmet and fault.unknown_component)]
    located = locate(faults if own else environment, origins, source)
    lines = [str(fault) for fault in located]
    if len(lines) > 1:
        lines.insert(0, ": ".join(part for part in (source, f"{len(lines)} faults") if part))
    hint = "\n".join(dict.fromkeys(fault.hint for fault in located if fault.hint))
    if own:
        raise InvalidConfig("\n".join(lines), hint, located)
    raise ConfigEnvironmentProblem("\n".join(lines), hint, located)
