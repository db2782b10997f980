"""The plugins that are installed, found without importing any of them, and the record that is kept
of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from importlib.metadata import Distribution, distributions
from typing import Any, Final

from attrs import asdict, define, field, frozen

from arb_ternary import __version__
from arb_ternary.specs import resolve

#: The entry-point group; an entry's value is a hook module.
GROUP: Final = "arb_ternary.plugins"
# : The entry-point group in which a distribution says where components are to be had: ``KIND.NAME``
# (or ``KIND.FAMILY``) : and the import name of the distribution that brings it. Nothing is ever
# imported through it.
KNOWN_GROUP: Final = "arb_ternary.known"
#: The plugin through which the program registers what is its own.
BUILTIN: Final = "builtin"
BUILTIN_MODULE: Final = "arb_ternary.builtin.plugin"
CORE_DISTRIBUTION: Final = "arb-ternary-core"


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


@define(kw_only=True, eq=False)
class PluginRecord:
    """A plugin and what became of it.

    Attributes:
        name: the entry point's name, or the file's stem, or the name given to ``register``.
        distribution: the distribution that it comes from; None for a file or a registered object.
        version: the distribution's version.
        module: the hook module's import name, or the file's path.
        status: the outcome.
        reason: why the status is not ok; empty when it is.
        components: what it provides, in the order of registration.
        results: what its registration hooks returned, by hook.
        hook_module: what implements its hooks, once it is imported: a module or an object.
    """

    name: str
    distribution: str | None = None
    version: str | None = None
    module: str = ""
    status: Status = Status.OK
    reason: str = ""
    components: tuple[Registered, ...] = ()
    results: Mapping[str, tuple[Any, ...]] = field(factory=dict, repr=False)
    hook_module: object = field(default=None, repr=False)

    @property
    def described(self) -> str:
        """Name and origin for messages: ``'x' (arb-ternary-x 1.0)``."""
        origin = f"{self.distribution} {self.version}" if self.distribution else self.module
        return f"{self.name!r} ({origin})"

    @property
    def fault(self) -> str:
        """What is wrong with it, on one line."""
        return f"plugin {self.described}: {self.status}: {self.reason}"

    @property
    def is_core(self) -> bool:
        """Whether it is the program's own."""
        return self.module == BUILTIN_MODULE

    @property
    def is_loaded(self) -> bool:
        """Whether it is in use: a plugin in conflict over one component still provides the
        others.
        """
        return self.status is Status.OK or bool(self.components)

    def refuse(self, status: Status, reason: str) -> None:
        """Note why the plugin, or a part of it, is not used."""
        self.status = status
        self.reason = reason

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        stated = asdict(
            self,
            recurse=False,
            filter=lambda attribute, _: attribute.name not in ("hook_module", "results"),
        )
        components = [{"kind": found.kind, "name": found.name} for found in self.components]
        return {**stated, "status": str(self.status), "components": components}


@frozen(eq=False)
class Registered:
    """A component and the plugin that it comes from; ``spec`` is of the class of its kind."""

    spec: Any
    plugin: PluginRecord = field(repr=False)

    @property
    def kind(self) -> str:
        """The kind of component, e.g. ``optimizer``."""
        return str(self.spec.kind)

    @property
    def name(self) -> str:
        """What a config calls it."""
        return str(self.spec.name)

    @property
    def distribution(self) -> str | None:
        """The plugin's distribution; None for a file or an object."""
        return self.plugin.distribution

    @property
    def reserved(self) -> bool:
        """Whether it keeps its name whatever others provide: commands of the core explain a broken
        installation.
        """
        return self.plugin.is_core and self.kind == "command"

    @property
    def described(self) -> str:
        """Kind, name and plugin for messages."""
        return f"{self.kind} {self.name!r} of plugin {self.plugin.described}"

    def load(self) -> Any:
        """Import the spec's target, as :func:`arb_ternary.specs.resolve` does."""
        return resolve(self.spec.target)


def discover() -> tuple[list[PluginRecord], list[str]]:
    """The plugin of every entry point on ``sys.path``, sorted by name, and a line on each
    distribution that is ignored.

    A distribution that is seen twice (an editable install beside a wheel, a path that is listed
    twice) counts once, and the first on the path counts, because that is the one that ``import``
    finds. One whose entry points cannot be read is a plugin that failed.
    """
    found: list[PluginRecord] = []
    notes: list[str] = []
    seen: dict[str, str] = {}
    for distribution in _announcing(GROUP):
        # damaged metadata must not keep this record, or another, from being made
        metadata: Any = distribution.metadata
        name = metadata.get("Name", "unnamed-distribution")
        version = metadata.get("Version", "0")
        if canonical(name) in seen:
            notes.append(
                f"{name} {version} ignored: {seen[canonical(name)]} comes first on sys.path"
            )
            continue
        seen[canonical(name)] = f"{name} {version}"
        try:
            entries = [entry for entry in distribution.entry_points if entry.group == GROUP]
        except Exception as error:  # the parser raises whatever a malformed line makes it raise
            record = PluginRecord(name=name, distribution=name, version=version)
            record.refuse(
                Status.FAILED, f"its entry points cannot be read: {type(error).__name__}: {error}"
            )
            found.append(record)
            continue
        for entry in entries:
            module = entry.value.strip()
            found.append(
                PluginRecord(name=entry.name, distribution=name, version=version, module=module)
            )
    if not any(record.is_core for record in found):
        # Imported from a source tree that was never installed: the program still needs its own
        # parts.
        found.append(
            PluginRecord(
                name=BUILTIN,
                distribution=CORE_DISTRIBUTION,
                version=__version__,
                module=BUILTIN_MODULE,
            )
        )
    return sorted(found, key=lambda record: (record.name, record.distribution or "")), notes


def announced() -> dict[str, str]:
    """The distribution of each component (``KIND.NAME``) that an installed distribution
    announces.
    """
    return {
        entry.name: canonical(entry.value)
        for distribution in _announcing(KNOWN_GROUP)
        for entry in distribution.entry_points
        if entry.group == KNOWN_GROUP
    }


def canonical(distribution: str) -> str:
    """A distribution's name in its normal form, in which two spellings of one name are equal."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _announcing(group: str) -> Iterator[Distribution]:
    """The distributions with an entry in a group; only their metadata are worth the time of
    parsing.
    """
    for distribution in distributions():
        try:
            text = distribution.read_text("entry_points.txt") or ""
        except UnicodeDecodeError:  # not UTF-8, so not written by any build tool: no entry of ours
            continue
        if group in text:
            yield distribution
