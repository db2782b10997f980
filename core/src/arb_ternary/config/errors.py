"""Faults of a config: collected all at once, located, and raised as one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from attrs import asdict, frozen

from arb_ternary.config.paths import Origin, Path, find_origin, show_path
from arb_ternary.errors import ConfigError, EnvironmentProblem

__all__ = ["ConfigEnvironmentProblem", "Fault", "Faulty", "InvalidConfig", "LocatedFault", "raise_faults"]

#: The order in which faults are listed; those of the file as a whole come first.
_ORDER = (None, "file", "override", "environment", "derived", "default")


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


class Faulty(ValueError):
    """Faults found below some point of the tree, with paths relative to it."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("; ".join(fault.message for fault in faults))
        self.faults = faults


@frozen
class LocatedFault:
    """A fault as it is printed: ``where: path: message``; the parts that are unknown are empty."""

    where: str
    path: str
    message: str
    hint: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.path, self.message) if part)

    def to_json(self) -> dict[str, Any]:
        """The fault as a JSON object."""
        return asdict(self)


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


def raise_faults(faults: Sequence[Fault], origins: Mapping[Path, Origin], source: str) -> NoReturn:
    """Raise every fault as one error, in the order of the file's lines, then of the overrides.

    The config is what is wrong as soon as one fault is its own; only when all of them lie in the environment is it an
    environment problem.

    Raises:
        InvalidConfig: exit code 2.
        ConfigEnvironmentProblem: exit code 3.
    """
    keyed = sorted((_locate(fault, origins, source) for fault in faults), key=lambda pair: pair[0])
    located = list(dict.fromkeys(fault for _, fault in keyed))
    lines = [str(fault) for fault in located]
    if len(lines) > 1:
        lines.insert(0, ": ".join(part for part in (source, f"{len(lines)} faults") if part))
    hint = "\n".join(dict.fromkeys(fault.hint for fault in located if fault.hint))
    error = ConfigEnvironmentProblem if all(fault.environment for fault in faults) else InvalidConfig
    raise error("\n".join(lines), hint, located)


def _locate(fault: Fault, origins: Mapping[Path, Origin], source: str) -> tuple[tuple[int, int], LocatedFault]:
    """The fault as it is printed, and its place in the order."""
    origin = fault.origin or find_origin(origins, fault.path)
    message = fault.message
    others = [str(found) for path in fault.also if (found := find_origin(origins, path)) is not None]
    if others:
        message += f" ({', '.join(others)})"
    place = (0, 0) if origin is None else (_ORDER.index(origin.kind), origin.order)
    where = source if origin is None else str(origin)
    return place, LocatedFault(where, show_path(fault.path), message, fault.hint)
