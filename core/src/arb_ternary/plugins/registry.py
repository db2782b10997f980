"""The components of all loaded plugins, by kind and name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen

from arb_ternary.errors import EnvironmentProblem
from arb_ternary.plugins.missing import explain_conflict, explain_missing
from arb_ternary.plugins.records import PluginRecord
from arb_ternary.specs import Spec, resolve

__all__ = ["Registered", "Registry"]


@frozen
class Registered:
    """A component and where it comes from.

    Attributes:
        spec: what the plugin registered.
        plugin: the plugin's name.
        distribution: the plugin's distribution; None for a file or an object.
        reserved: whether it keeps its name whatever other plugins provide.
    """

    spec: Spec
    plugin: str
    distribution: str | None
    reserved: bool = False

    @property
    def kind(self) -> str:
        """The kind of component, e.g. ``optimizer``."""
        return self.spec.kind

    @property
    def name(self) -> str:
        """What a config calls it."""
        return self.spec.name

    def load(self) -> Any:
        """Import the spec's target.

        Raises:
            ImportError, AttributeError: the target is not there.
        """
        return resolve(self.spec.target)


class Registry:
    """Components by kind and name.

    A name that two plugins provide belongs to neither: ``find`` returns None for it, and ``get`` raises an error that
    names both. Only a reserved one stays: the commands that explain a broken installation must not be broken by it.

    Attributes:
        kinds: the kinds of component that the loaded plugins know, by name.
    """

    def __init__(self, kinds: Mapping[str, type[Spec]]) -> None:
        self.kinds = kinds
        self._entries: dict[tuple[str, str], list[Registered]] = {}
        self._records: dict[tuple[str, str | None], PluginRecord] = {}

    # --- lookup ------------------------------------------------------------------------------------------------------

    def get(self, kind: str, name: str) -> Registered:
        """The component of that kind and name.

        Raises:
            UsageProblem: there is no such component (exit code 2).
            EnvironmentProblem: it is not installed, its plugin was not loaded, or two plugins provide it (exit code 3).
        """
        found = self.find(kind, name)
        if found is not None:
            return found
        rivals = self._entries.get((kind, name), ())
        if rivals:
            raise explain_conflict(self.kinds[kind], name, [self.record_of(rival) for rival in rivals])
        raise explain_missing(self.kinds[kind], name, self.names(kind), self.records)

    def find(self, kind: str, name: str) -> Registered | None:
        """The component of that kind and name, or None when there is none that can be used.

        Raises:
            EnvironmentProblem: no loaded plugin knows the kind.
        """
        if kind not in self.kinds:
            raise EnvironmentProblem(
                f"no loaded plugin knows the kind of component {kind!r}", f"known: {', '.join(self.kinds)}"
            )
        entries = self._entries.get((kind, name), ())
        reserved = next((entry for entry in entries if entry.reserved), None)
        return reserved or (entries[0] if len(entries) == 1 else None)

    def names(self, kind: str) -> tuple[str, ...]:
        """The usable names of a kind, sorted."""
        return tuple(registered.name for registered in self.all(kind))

    def all(self, kind: str) -> tuple[Registered, ...]:
        """The usable components of a kind, sorted by name."""
        found = (self.find(kind, name) for entry_kind, name in sorted(self._entries) if entry_kind == kind)
        return tuple(registered for registered in found if registered is not None)

    def everything(self) -> tuple[Registered, ...]:
        """The components of every kind, contested names included."""
        return tuple(entry for entries in self._entries.values() for entry in entries)

    def rivals(self, registered: Registered) -> tuple[Registered, ...]:
        """Components of other plugins that claim the same kind and name."""
        entries = self._entries.get((registered.kind, registered.name), ())
        return tuple(entry for entry in entries if entry is not registered)

    # --- plugins -----------------------------------------------------------------------------------------------------

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """A record of every plugin that was found, in the order of loading."""
        return tuple(self._records.values())

    def record_of(self, registered: Registered) -> PluginRecord:
        """The record of the plugin that a component comes from."""
        return self._records[registered.plugin, registered.distribution]

    def note(self, record: PluginRecord) -> None:
        """Keep, or replace, the record of a plugin."""
        self._records[record.name, record.distribution] = record

    def add(self, specs: Iterable[Spec], record: PluginRecord, *, reserved: str = "") -> tuple[Registered, ...]:
        """Add what a plugin provides; specs of the kind ``reserved`` cannot be contested."""
        added = tuple(Registered(spec, record.name, record.distribution, spec.kind == reserved) for spec in specs)
        for registered in added:
            self._entries.setdefault((registered.kind, registered.name), []).append(registered)
        return added

    def of_plugin(self, record: PluginRecord) -> tuple[Registered, ...]:
        """What a plugin provides, contested names included."""
        origin = (record.name, record.distribution)
        return tuple(entry for entry in self.everything() if (entry.plugin, entry.distribution) == origin)

    def forget(self, record: PluginRecord) -> None:
        """Remove a plugin's components and its record."""
        for entry in self.of_plugin(record):
            self._entries[entry.kind, entry.name].remove(entry)
        self._records.pop((record.name, record.distribution), None)
