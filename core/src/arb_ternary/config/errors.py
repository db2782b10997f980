"""Faults of a config: collected all at once, located, and raised as one error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from attrs import evolve, frozen

from arb_ternary.config.paths import Origin, Path, find_origin, show_path
from arb_ternary.errors import ArbError, ConfigError, EnvironmentProblem

__all__ = ["ConfigEnvironmentProblem", "Fault", "Faulty", "InvalidConfig", "raise_faults"]

#: The order in which faults are listed; those of the file as a whole come first.
_ORDER = ("whole", "file", "override", "environment", "derived", "default")


@frozen
class Fault:
    """One thing that is wrong; as text, ``where: path: message`` without the parts that are unknown.

    Attributes:
        path: from the root of the config.
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

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.origin or ""), show_path(self.path), self.message) if part)

    def to_json(self) -> dict[str, str]:
        """The fault as a JSON object."""
        where, path = str(self.origin or ""), show_path(self.path)
        return {"where": where, "path": path, "message": self.message, "hint": self.hint}

    def under(self, path: Path) -> Fault:
        """The fault as seen from where the value that it was found in has the path ``path``."""
        return evolve(self, path=(*path, *self.path), also=tuple((*path, *other) for other in self.also))

    def located(self, origins: Mapping[Path, Origin], source: str) -> Fault:
        """The fault with its origin, and with those of ``also`` in its message."""
        origin = self.origin or find_origin(origins, self.path) or Origin("whole", source)
        others = [str(found) for path in self.also if (found := find_origin(origins, path)) is not None]
        message = f"{self.message} ({', '.join(others)})" if others else self.message
        return evolve(self, origin=origin, message=message, also=())


class Faulty(ValueError):
    """Faults found below some point of the tree, with paths relative to it."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("; ".join(fault.message for fault in faults))
        self.faults = faults


class _WithFaults(ArbError):
    def __init__(self, what: str, hint: str, faults: Sequence[Fault]) -> None:
        super().__init__(what, hint)
        self.faults = tuple(faults)


class InvalidConfig(_WithFaults, ConfigError):
    """A config with faults, one line each."""


class ConfigEnvironmentProblem(_WithFaults, EnvironmentProblem):
    """A config without faults of its own that names what this environment does not have."""


def raise_faults(faults: Iterable[Fault], origins: Mapping[Path, Origin], source: str) -> NoReturn:
    """Raise every fault as one error, in the order of the file's lines, then of the overrides.

    The config is what is wrong as soon as one fault is its own; only when all of them lie in the environment is it an
    environment problem.

    Raises:
        InvalidConfig: exit code 2.
        ConfigEnvironmentProblem: exit code 3.
    """
    located = list(dict.fromkeys(fault.located(origins, source) for fault in faults))
    located.sort(key=lambda fault: (_ORDER.index(fault.origin.kind), fault.origin.order) if fault.origin else (0, 0))
    lines = [str(fault) for fault in located]
    if len(lines) > 1:
        lines.insert(0, ": ".join(part for part in (source, f"{len(lines)} faults") if part))
    hint = "\n".join(dict.fromkeys(fault.hint for fault in located if fault.hint))
    error = ConfigEnvironmentProblem if all(fault.environment for fault in located) else InvalidConfig
    raise error("\n".join(lines), hint, located)
