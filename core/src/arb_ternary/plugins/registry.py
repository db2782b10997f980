"""The components of all loaded plugins, by kind and name, and what a user reads who names one that
is not there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from arb_ternary.errors import ArbError, EnvironmentProblem, UsageProblem, nearest
from arb_ternary.plugins.discovery import PluginRecord, Registered, Status, announced, canonical
from arb_ternary.specs import Spec

# : The distribution whose metadata says where the usual components are, and whose installation
# brings them.
USUAL_PARTS: Final = "arb-ternary"

_OUTCOMES: Final = {
    Status.BLOCKED: "is blocked",
    Status.INCOMPATIBLE: "is incompatible",
    Status.CONFLICT: "is in conflict with another",
    Status.FAILED: "failed to load",
    Status.UNKNOWN_HOOK: "implements an unknown hook",
}


class Registry:
    """Components by kind and name.

    A name that two plugins provide belongs to neither: ``find`` returns None for it, and ``get``
    raises an error that names both. Only a reserved one stays: the commands that explain a broken
    installation must not be broken by it.

    Attributes:
        kinds: the kinds of component that the loaded plugins know, by name.
        records: every plugin that was found, in the order of loading.
    """

    def __init__(self, kinds: Mapping[str, type[Spec]]) -> None:
        self.kinds = kinds
        self.records: list[PluginRecord] = []

    def get(self, kind: str, name: str) -> Registered:
        """The component of that kind and name.

        Raises:
            UsageProblem: there is none.
            EnvironmentProblem: it is not installed, its plugin was not loaded, or two plugins
                provide it.
        """
        found = self.find(kind, name)
        if found is None:
            raise self.problem(kind, name)
        return found

    def find(self, kind: str, name: str) -> Registered | None:
        """The component of that kind and name, or None when there is none that can be used."""
        if kind not in self.kinds:
            raise EnvironmentProblem(
                f"no loaded plugin knows the kind of component {kind!r}",
                f"known: {', '.join(self.kinds)}",
            )
        claims = self.claims(kind, name)
        return next((claim for claim in claims if claim.reserved or len(claims) == 1), None)

    def names(self, kind: str) -> tuple[str, ...]:
        """The usable names of a kind, sorted."""
        return tuple(found.name for found in self.all(kind))

    def all(self, kind: str) -> tuple[Registered, ...]:
        """The usable components of a kind, sorted by name."""
        usable = [
            found
            for found in self.everything()
            if found.kind == kind and self.find(kind, found.name) is found
        ]
        return tuple(sorted(usable, key=lambda found: found.name))

    def everything(self) -> tuple[Registered, ...]:
        """The components of every kind, contested names included."""
        return tuple(found for record in self.records for found in record.components)

    def results(self, hook: str) -> tuple[tuple[PluginRecord, Any], ...]:
        """Every item that plugins returned from a registration hook, with its plugin."""
        return tuple(
            (record, item) for record in self.records for item in record.results.get(hook, ())
        )

    def by_name(self, hook: str) -> dict[str, Any]:
        """The items that plugins returned from a registration hook, by their ``name``, sorted.

        Raises:
            EnvironmentProblem: two plugins return items of the same name.
        """
        found: dict[str, tuple[PluginRecord, Any]] = {}
        for record, item in self.results(hook):
            if item.name in found:
                rivals = [found[item.name][0], record]
                raise _contested(f"{hook}: {item.name!r}", rivals)
            found[item.name] = record, item
        return {name: found[name][1] for name in sorted(found)}

    def claims(self, kind: str, name: str) -> list[Registered]:
        """The components of that kind and name, of whatever plugin: several where plugins are in
        conflict.
        """
        return [found for found in self.everything() if found.name == name and found.kind == kind]

    def not_installed(self, kind: str) -> dict[str, str]:
        """Announced components of a kind whose distribution is not installed, each with that
        distribution.
        """
        installed = {
            canonical(record.distribution) for record in self.records if record.distribution
        }
        return {
            entry.removeprefix(f"{kind}."): distribution
            for entry, distribution in sorted(announced().items())
            if entry.startswith(f"{kind}.") and distribution not in installed
        }

    def problem(
        self, kind: str, name: str, unusable: Mapping[str, str] = MappingProxyType({})
    ) -> ArbError:
        """Why a name that ``find`` does not find cannot be used, and what the user can do about it.

        ``unusable`` are registered names that cannot be used here, each with the reason.
        """
        noun = self.kinds[kind].noun
        claims = self.claims(kind, name)
        if claims:
            return _contested(f"{noun} {name!r}", [claim.plugin for claim in claims])
        return self.missing(kind, noun, name, self.names(kind), unusable)

    def missing(
        self,
        kind: str,
        noun: str,
        name: str,
        names: Collection[str],
        unusable: Mapping[str, str] = MappingProxyType({}),
    ) -> ArbError:
        """Why nothing is registered under a name, and what the user can do about it.

        Args:
            kind: how distributions announce it: ``KIND.NAME`` in the group ``arb_ternary.known``.
            noun: how messages speak of it.
            name: the name that the user wrote.
            names: the registered names.
            unusable: registered names that cannot be used here, each with the reason.
        """
        known = announced()
        unloaded = [record for record in self.records if not record.is_loaded]
        # A name stands for its family too: what brings `a` brings `a.b`.
        source = known.get(f"{kind}.{name}") or known.get(f"{kind}.{name.partition('.')[0]}")
        if source is not None:
            owners = [
                record for record in self.records if canonical(record.distribution or "") == source
            ]
            if not owners:
                return EnvironmentProblem(
                    f"{noun} {name!r} is not installed", f"pip install {source}"
                )
            unloaded_owners = [owner for owner in owners if owner in unloaded]
            if unloaded_owners:
                return _may_come_from(noun, name, unloaded_owners)
        absent = self.not_installed(kind)
        close = nearest(name, [*names, *absent])
        suspects = [record for record in unloaded if record.status is not Status.BLOCKED]
        if suspects and close is None:
            return _may_come_from(noun, name, suspects)
        hint = [f"did you mean {close!r}?"] if close else []
        hint.append(
            f"available: {', '.join(each for each in names if each not in unusable) or 'none'}"
        )
        hint.extend(f"unavailable: {other} ({reason})" for other, reason in unusable.items())
        hint.extend(f"not installed: {other} (pip install {absent[other]})" for other in absent)
        hint.extend(f"not loaded: {_outcome(record)}" for record in unloaded)
        if not known:
            hint.append(f"pip install {USUAL_PARTS} brings the program's usual parts")
        return UsageProblem(f"no {noun} is called {name!r}", "\n".join(hint))


def _contested(what: str, rivals: Sequence[PluginRecord]) -> EnvironmentProblem:
    """Two or more plugins provide the same name; say so, and how to disable an installed one."""
    installed = [rival for rival in rivals if rival.distribution]
    last = (installed or rivals)[-1].name
    described = " and ".join(rival.described for rival in rivals)
    return EnvironmentProblem(
        f"{what} is provided by more than one plugin: {described}",
        f"uninstall all but one of them, or disable one: ARB_PLUGINS_DISABLED={last}",
    )


def _outcome(record: PluginRecord) -> str:
    return f"plugin {record.described}, which {_OUTCOMES[record.status]}: {record.reason}"


def _may_come_from(noun: str, name: str, suspects: Sequence[PluginRecord]) -> ArbError:
    what = " or from ".join(_outcome(suspect) for suspect in suspects)
    names = " ".join(suspect.name for suspect in suspects)
    return EnvironmentProblem(
        f"{noun} {name!r} may come from {what}", f"see: arb plugins show {names}"
    )
