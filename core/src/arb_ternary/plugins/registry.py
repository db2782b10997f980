"""The components of all loaded plugins, by kind and name, and errors for names that are missing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from arb_ternary.errors import ArbError, EnvironmentProblem, UsageProblem, nearest
from arb_ternary.plugins.discovery import USUAL_PARTS, announced, install_command
from arb_ternary.plugins.record import PluginRecord, Registered, written
from arb_ternary.specs import KINDS, Spec

#: How many plugins that are not loaded an error names with their reasons.
_LISTED: Final = 2


class Registry:
    """Components by kind and name.

    A name that two plugins provide belongs to neither: ``find`` returns None for it, and ``get``
    raises an error that names both. The core's own names, and those that a distribution announces,
    stay with their owner: see :meth:`keeper`.

    Attributes:
        kinds: the kinds of component, by name.
        records: every plugin that was found, in the order of loading.
    """

    kinds: Final[Mapping[str, type[Spec]]] = {kind.kind: kind for kind in KINDS}

    def __init__(self) -> None:
        self.records: list[PluginRecord] = []
        self._claims: dict[tuple[str, str], list[Registered]] = {}

    def add(self, components: Sequence[Registered]) -> None:
        """Add the components of a plugin."""
        for found in components:
            self._claims.setdefault((found.kind, found.name), []).append(found)

    # --- looking up

    def get(self, kind: str, name: str) -> Registered:
        """Return the component of that kind and name.

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
        """Return the component of that kind and name, or None if there is none that can be used."""
        claims = self.claims(kind, name)
        if len(claims) < 2:
            return claims[0] if claims else None
        return self.keeper(kind, name)

    def keeper(self, kind: str, name: str) -> Registered | None:
        """Return the component that keeps its name if other plugins provide the name too.

        It is the core's, or that of the distribution for which the name is announced.
        """
        owner = announced().get(f"{kind}.{name}")
        for claim in self.claims(kind, name):
            if claim.plugin.is_core or claim.plugin.comes_from(owner):
                return claim
        return None

    def names(self, kind: str) -> tuple[str, ...]:
        """The usable names of a kind, sorted."""
        return tuple(found.name for found in self.all(kind))

    def all(self, kind: str) -> tuple[Registered, ...]:
        """The usable components of a kind, sorted by name."""
        usable = []
        for known, name in sorted(self._claims):
            found = self.find(kind, name) if known == kind else None
            if found is not None:
                usable.append(found)
        return tuple(usable)

    def everything(self) -> tuple[Registered, ...]:
        """The components of every kind, including names that several plugins provide."""
        found: list[Registered] = []
        for record in self.records:
            found += record.components
        return tuple(found)

    def claims(self, kind: str, name: str) -> Sequence[Registered]:
        """The components of that kind and name: several if plugins are in conflict."""
        return self._claims.get((kind, name), ())

    def results(self, hook: str) -> tuple[tuple[PluginRecord, Any], ...]:
        """Every item that plugins returned from a registration hook, with its plugin."""
        found: list[tuple[PluginRecord, Any]] = []
        for record in self.records:
            items = record.results.get(hook, ())
            found.extend((record, item) for item in items)
        return tuple(found)

    def by_name(self, hook: str) -> dict[str, Any]:
        """The items that plugins returned from a registration hook, by their ``name``, sorted.

        Raises:
            EnvironmentProblem: two plugins return items of the same name.
        """
        items: dict[str, Any] = {}
        providers: dict[str, PluginRecord] = {}
        for record, item in self.results(hook):
            name = item.name
            if name in items:
                raise _contested(f"{hook}: {name!r}", [providers[name], record])
            items[name] = item
            providers[name] = record
        return dict(sorted(items.items(), key=lambda entry: entry[0]))

    # --- what is missing

    def not_installed(self, kind: str) -> dict[str, str]:
        """Announced components of a kind that are not installed, each with its distribution."""
        absent = {}
        for entry, distribution in sorted(announced().items()):
            announced_kind, _, name = entry.partition(".")
            if announced_kind == kind and not self._from(distribution):
                absent[name] = distribution
        return absent

    def _from(self, distribution: str) -> list[PluginRecord]:
        """Return the plugins of a distribution, whose name is in its normal form."""
        return [record for record in self.records if record.comes_from(distribution)]

    def problem(
        self, kind: str, name: str, unusable: Mapping[str, str] = MappingProxyType({})
    ) -> ArbError:
        """Return the error for a name that ``find`` does not find, with what the user can do.

        ``unusable`` are registered names that cannot be used here, each with the reason.
        """
        noun = self.kinds[kind].noun
        claims = self.claims(kind, name)
        if claims:
            return _contested(f"{noun} {written(kind, name)!r}", [claim.plugin for claim in claims])
        return self.missing(kind, noun, name, self.names(kind), unusable)

    def missing(
        self,
        kind: str,
        noun: str,
        name: str,
        names: Collection[str],
        unusable: Mapping[str, str] = MappingProxyType({}),
    ) -> ArbError:
        """Return the error for a name that is not registered, with what the user can do.

        Args:
            kind: how distributions announce it: ``KIND.NAME`` in the group ``arb_ternary.known``.
            noun: how messages speak of it.
            name: the name that the user wrote.
            names: the registered names.
            unusable: registered names that cannot be used here, each with the reason.
        """
        known = announced()
        unloaded = [record for record in self.records if not record.loaded]

        # A name stands for its family too: the distribution of `a` has `a.b`.
        family = name.partition(".")[0]
        source = known.get(f"{kind}.{name}") or known.get(f"{kind}.{family}")
        name = written(kind, name)
        if source is not None:
            owners = self._from(source)
            if not owners:
                return EnvironmentProblem(
                    f"{noun} {name!r} is not installed",
                    install_command(source),
                )
            unloaded_owners = [owner for owner in owners if owner in unloaded]
            if unloaded_owners:
                return _may_come_from(noun, name, unloaded_owners)

        absent = {written(kind, each): owner for each, owner in self.not_installed(kind).items()}
        close = nearest(name, [*(written(kind, each) for each in names), *absent])
        failed = [record for record in unloaded if not record.disabled]
        if failed and close is None:
            return _may_come_from(noun, name, failed)

        available = [written(kind, each) for each in names if each not in unusable]
        # What failed comes first: advice on spelling may only follow from it.
        hint = [f"not loaded: {_state_of(record)}" for record in failed]
        if close:
            hint.append(f"did you mean {close!r}?")
        hint.append(f"available: {', '.join(available) or 'none'}")
        for other, reason in unusable.items():
            hint.append(f"unavailable: {other} ({reason})")
        for other, distribution in absent.items():
            hint.append(f"not installed: {other} ({install_command(distribution)})")
        hint += [f"not loaded: {_state_of(record)}" for record in unloaded if record.disabled]
        if all(entry.startswith("name.") for entry in known):
            # These come with the core, all others with the usual parts.
            hint.append(f"{install_command(USUAL_PARTS)} brings the program's usual parts")
        return UsageProblem(f"no {noun} is called {name!r}", "\n".join(hint))


def _contested(what: str, rivals: Sequence[PluginRecord]) -> EnvironmentProblem:
    """Return the error for a name that several plugins provide."""
    # The user is advised to disable one: an installed one rather than a file.
    installed = [rival for rival in rivals if rival.distribution]
    last = (installed or rivals)[-1].name
    described = " and ".join(rival.described for rival in rivals)
    return EnvironmentProblem(
        f"{what} is provided by more than one plugin: {described}",
        f"uninstall all but one of them, or disable one: ARB_PLUGINS_DISABLED={last}",
    )


def _state_of(record: PluginRecord) -> str:
    """Describe a plugin that is not loaded, and why it is not."""
    state = "is disabled" if record.disabled else "failed to load"
    return f"plugin {record.described}, which {state}: {record.reason}"


def _may_come_from(noun: str, name: str, suspects: Sequence[PluginRecord]) -> ArbError:
    """Return the error for a name that plugins that are not loaded may provide."""
    names = " ".join(suspect.name for suspect in suspects)
    what = " or from ".join(_state_of(suspect) for suspect in suspects)
    if len(suspects) > _LISTED:
        what = f"one of {len(suspects)} plugins that are not loaded"
    return EnvironmentProblem(
        f"{noun} {name!r} may come from {what}",
        f"see: arb plugins show {names}",
    )
