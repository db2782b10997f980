"""Why a name cannot be used, and what the user can do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from arb_ternary.errors import ArbError, EnvironmentProblem, UsageProblem, nearest
from arb_ternary.plugins.discovery import announced, canonical
from arb_ternary.plugins.records import PluginRecord, Status
from arb_ternary.specs import Spec

__all__ = ["USUAL_PARTS", "explain_conflict", "explain_missing", "not_installed"]

#: The distribution whose metadata says where the usual components are, and whose installation brings them.
USUAL_PARTS = "arb-ternary"

_OUTCOMES = {
    Status.BLOCKED: "is blocked",
    Status.INCOMPATIBLE: "is incompatible",
    Status.CONFLICT: "is in conflict with another",
    Status.FAILED: "failed to load",
    Status.UNKNOWN_HOOK: "implements an unknown hook",
}


def not_installed(kind: str, records: Iterable[PluginRecord]) -> dict[str, str]:
    """Announced components of a kind whose distribution is not installed, each with that distribution."""
    installed = {canonical(record.distribution) for record in records if record.distribution}
    return {
        entry.removeprefix(f"{kind}."): distribution
        for entry, distribution in sorted(announced().items())
        if entry.startswith(f"{kind}.") and distribution not in installed
    }


def explain_conflict(kind: type[Spec], name: str, rivals: Sequence[PluginRecord]) -> ArbError:
    """The error for a name that several plugins provide."""
    described = " and ".join(rival.described for rival in rivals)
    last = next((rival for rival in reversed(rivals) if rival.distribution), rivals[-1]).name
    return EnvironmentProblem(
        f"{kind.noun} {name!r} is provided by more than one plugin: {described}",
        f"uninstall all but one of them, or disable one: ARB_PLUGINS_DISABLED={last}",
    )


def explain_missing(kind: type[Spec], name: str, available: Sequence[str], records: Sequence[PluginRecord]) -> ArbError:
    """The error for a name that no loaded plugin provides."""
    known = announced()
    # A name stands for its family too: what brings `a` brings `a.b`.
    distribution = known.get(f"{kind.kind}.{name}") or known.get(f"{kind.kind}.{name.partition('.')[0]}")
    if distribution is not None:
        owners = [record for record in records if canonical(record.distribution or "") == distribution]
        if not owners:
            return EnvironmentProblem(f"{kind.noun} {name!r} is not installed", f"pip install {distribution}")
        unusable = [owner for owner in owners if _is_unloaded(owner)]
        if unusable:
            return _may_come_from(kind, name, unusable)
    absent = not_installed(kind.kind, records)
    close = nearest(name, [*available, *absent])
    suspects = [record for record in records if _is_unloaded(record) and record.status is not Status.BLOCKED]
    if suspects and close is None:
        return _may_come_from(kind, name, suspects)
    hint = [f"did you mean {close!r}?"] if close else []
    hint.append(f"available: {', '.join(available) or 'none'}")
    hint.extend(f"not installed: {other} (pip install {absent[other]})" for other in absent)
    hint.extend(f"not loaded: {_outcome(record)}" for record in records if _is_unloaded(record))
    if not known:
        hint.append(f"pip install {USUAL_PARTS} brings the program's usual parts")
    return UsageProblem(f"no {kind.noun} is called {name!r}", "\n".join(hint))


def _is_unloaded(record: PluginRecord) -> bool:
    """Whether nothing of the plugin is registered: one in conflict over a single component still provides the rest."""
    return record.status is not Status.OK and not record.components


def _outcome(record: PluginRecord) -> str:
    return f"plugin {record.described}, which {_OUTCOMES[record.status]}: {record.reason}"


def _may_come_from(kind: type[Spec], name: str, suspects: Sequence[PluginRecord]) -> ArbError:
    what = " or from ".join(_outcome(suspect) for suspect in suspects)
    names = " ".join(suspect.name for suspect in suspects)
    return EnvironmentProblem(f"{kind.noun} {name!r} may come from {what}", f"see: arb plugins show {names}")
