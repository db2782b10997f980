"""The components of all loaded plugins, by kind and name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen

from arb_ternary.plugins.missing import explain_conflict, explain_missing
from arb_ternary.plugins.records import PluginRecord
from arb_ternary.plugins.surface import NOUNS
from arb_ternary.specs import Spec, resolve

__all__ = ["Registered", "Registry"]


@frozen
class Registered:
    """A component and where it comes from: its spec, the plugin's name, and the distribution (None for a file)."""

    spec: Spec
    plugin: str
    distribution: str | None

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
    names both. Names registered as ``reserved`` stay with the plugin that reserved them: the commands that explain a
    broken installation must not be broken by it.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], list[Registered]] = {}
        self._reserved: dict[tuple[str, str], Registered] = {}
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
            raise explain_conflict(kind, name, [self.record_of(rival) for rival in rivals])
        raise explain_missing(kind, name, self.names(kind), self.records)

    def find(self, kind: str, name: str) -> Registered | None:
        """The component of that kind and name, or None when there is none that can be used."""
        if kind not in NOUNS:
            raise ValueError(f"no kind of component is called {kind!r}; kinds: {', '.join(NOUNS)}")
        reserved = self._reserved.get((kind, name))
        if reserved is not None:
            return reserved
        entries = self._entries.get((kind, name), ())
        return entries[0] if len(entries) == 1 else None

    def names(self, kind: str) -> tuple[str, ...]:
        """The usable names of a kind, sorted."""
        return tuple(registered.name for registered in self.all(kind))

    def all(self, kind: str) -> tuple[Registered, ...]:
        """The usable components of a kind, sorted by name."""
        found = (self.find(kind, name) for entry_kind, name in sorted(self._entries) if entry_kind == kind)
        return tuple(registered for registered in found if registered is not None)

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

    def add(
        self, specs: Iterable[Spec], record: PluginRecord, *, reserved: Iterable[str] = ()
    ) -> tuple[Registered, ...]:
        """Add what a plugin provides; specs of the ``reserved`` kinds cannot be contested."""
        kinds = frozenset(reserved)
        added = tuple(Registered(spec, record.name, record.distribution) for spec in specs)
        for registered in added:
            key = (registered.kind, registered.name)
            self._entries.setdefault(key, []).append(registered)
            if registered.kind in kinds:
                self._reserved[key] = registered
        return added

    def is_reserved(self, registered: Registered) -> bool:
        """Whether a component keeps its name whatever other plugins provide."""
        return self._reserved.get((registered.kind, registered.name)) is registered

    def of_plugin(self, record: PluginRecord) -> tuple[Registered, ...]:
        """What a plugin provides, contested names included."""
        return tuple(
            entry
            for entries in self._entries.values()
            for entry in entries
            if (entry.plugin, entry.distribution) == (record.name, record.distribution)
        )

    def forget(self, record: PluginRecord) -> None:
        """Remove a plugin's components and its record."""
        self._records.pop((record.name, record.distribution), None)
        gone = frozenset(map(id, self.of_plugin(record)))
        self._reserved = {key: entry for key, entry in self._reserved.items() if id(entry) not in gone}
        kept: Mapping[tuple[str, str], list[Registered]] = {
            key: [entry for entry in entries if id(entry) not in gone] for key, entries in self._entries.items()
        }
        self._entries = {key: entries for key, entries in kept.items() if entries}
