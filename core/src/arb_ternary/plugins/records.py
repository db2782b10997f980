"""What became of each plugin that was found."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from attrs import asdict, field, frozen

__all__ = ["PluginRecord", "Status"]


class Status(StrEnum):
    """The outcome of loading a plugin."""

    OK = "ok"
    #: kept out by ARB_PLUGINS or ARB_PLUGINS_DISABLED; its module was not imported
    BLOCKED = "blocked"
    #: written for another version of the plugin interface
    INCOMPATIBLE = "incompatible"
    #: provides a name that another plugin provides too; what is not in conflict works
    CONFLICT = "conflict"
    #: raised an exception; nothing of it is registered
    FAILED = "failed"
    #: implements a hook that does not exist; nothing of it is registered
    UNKNOWN_HOOK = "unknown-hook"


def _pairs(components: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple(components)


@frozen(kw_only=True)
class PluginRecord:
    """A plugin and what became of it.

    Attributes:
        name: the entry point's name, or the file's stem, or the name given to ``register``.
        distribution: the distribution that it comes from; None for a file or a registered object.
        version: the distribution's version.
        module: the hook module's import name, or the file's path.
        status: the outcome.
        reason: why the status is not ok; empty when it is.
        components: kind and name of what it provides, in the order of registration.
    """

    name: str
    distribution: str | None = None
    version: str | None = None
    module: str = ""
    status: Status = Status.OK
    reason: str = ""
    components: tuple[tuple[str, str], ...] = field(default=(), converter=_pairs)

    @property
    def described(self) -> str:
        """Name and origin for messages: ``'x' (arb-ternary-x 1.0)``."""
        origin = f"{self.distribution} {self.version}" if self.distribution else self.module
        return f"{self.name!r} ({origin})"

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        components = [{"kind": kind, "name": name} for kind, name in self.components]
        return {**asdict(self), "status": str(self.status), "components": components}
