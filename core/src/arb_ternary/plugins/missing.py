"""Why a name cannot be used, and what the user can do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from arb_ternary.errors import ArbError, EnvironmentProblem, UsageProblem, nearest
from arb_ternary.plugins.discovery import canonical
from arb_ternary.plugins.records import PluginRecord, Status
from arb_ternary.plugins.surface import NOUNS

__all__ = ["explain_conflict", "explain_missing", "known_distribution", "known_names", "not_installed"]

_OUTCOMES = {
    Status.BLOCKED: "is blocked",
    Status.INCOMPATIBLE: "is incompatible",
    Status.CONFLICT: "is in conflict with another",
    Status.FAILED: "failed to load",
    Status.UNKNOWN_HOOK: "implements an unknown hook",
}


@cache
def _known() -> dict[str, dict[str, str]]:
    import tomllib

    return tomllib.loads(Path(__file__).with_name("known.toml").read_text(encoding="utf-8"))


def known_names(kind: str) -> dict[str, str]:
    """Announced components of a kind and their distributions; a name that ends in ``.*`` stands for a family."""
    return dict(_known().get(kind, {}))


def known_distribution(kind: str, name: str) -> str | None:
    """The distribution to install for a component, or None when it is not an announced one."""
    known = known_names(kind)
    return known.get(name) or known.get(f"{name.partition('.')[0]}.*" if "." in name else "")


def not_installed(kind: str, records: Iterable[PluginRecord]) -> dict[str, str]:
    """Announced components of a kind whose distribution is not installed."""
    installed = {canonical(record.distribution) for record in records if record.distribution}
    return {name: distribution for name, distribution in known_names(kind).items() if distribution not in installed}


def explain_conflict(kind: str, name: str, rivals: Sequence[PluginRecord]) -> ArbError:
    """The error for a name that several plugins provide."""
    described = " and ".join(rival.described for rival in rivals)
    removable = [rival for rival in rivals if rival.distribution] or list(rivals)
    last = removable[-1].name
    return EnvironmentProblem(
        f"{NOUNS[kind]} {name!r} is provided by more than one plugin: {described}",
        f"uninstall all but one of them, or disable one: ARB_PLUGINS_DISABLED={last}",
    )


def explain_missing(kind: str, name: str, available: Sequence[str], records: Sequence[PluginRecord]) -> ArbError:
    """The error for a name that no loaded plugin provides."""
    distribution = known_distribution(kind, name)
    if distribution is not None:
        owners = [
            record for record in records if record.distribution and canonical(record.distribution) == distribution
        ]
        if not owners:
            return EnvironmentProblem(f"{NOUNS[kind]} {name!r} is not installed", f"pip install {distribution}")
        unusable = [owner for owner in owners if _is_unloaded(owner)]
        if unusable:
            return _may_come_from(kind, name, unusable)
    absent = not_installed(kind, records)
    close = nearest(name, [*available, *(known for known in absent if not known.endswith(".*"))])
    suspects = [record for record in records if _is_unloaded(record) and record.status is not Status.BLOCKED]
    if suspects and close is None:
        return _may_come_from(kind, name, suspects)
    hint = [f"did you mean {close!r}?"] if close else []
    hint.append(f"available: {', '.join(available) or 'none'}")
    hint.extend(f"not installed: {known} (pip install {absent[known]})" for known in sorted(absent))
    hint.extend(f"not loaded: {_outcome(record)}" for record in records if _is_unloaded(record))
    return UsageProblem(f"no {NOUNS[kind]} is called {name!r}", "\n".join(hint))


def _is_unloaded(record: PluginRecord) -> bool:
    """Whether nothing of the plugin is registered: one in conflict over a single component still provides the rest."""
    return record.status is not Status.OK and not record.components


def _outcome(record: PluginRecord) -> str:
    return f"plugin {record.described}, which {_OUTCOMES[record.status]}: {record.reason}"


def _may_come_from(kind: str, name: str, suspects: Sequence[PluginRecord]) -> ArbError:
    what = " or from ".join(_outcome(suspect) for suspect in suspects)
    names = " ".join(suspect.name for suspect in suspects)
    return EnvironmentProblem(f"{NOUNS[kind]} {name!r} may come from {what}", f"see: arb plugins show {names}")
