"""Finds the plugins that are installed, without importing any of them."""

from __future__ import annotations

import re
from importlib.metadata import Distribution, distributions
from typing import Final

from attrs import evolve

from arb_ternary import __version__
from arb_ternary.plugins.records import PluginRecord, Status

__all__ = [
    "BUILTIN",
    "BUILTIN_MODULE",
    "CORE_DISTRIBUTION",
    "GROUP",
    "KNOWN_GROUP",
    "announced",
    "canonical",
    "discover",
]

#: The entry-point group; an entry's value is a hook module.
GROUP: Final = "arb_ternary.plugins"
#: The entry-point group in which a distribution says where components are to be had: ``KIND.NAME`` (or ``KIND.FAMILY``)
#: and the import name of the distribution that brings it. Nothing is ever imported through it.
KNOWN_GROUP: Final = "arb_ternary.known"
#: The plugin through which the program registers what is its own.
BUILTIN: Final = "builtin"
BUILTIN_MODULE: Final = "arb_ternary.builtin.plugin"
CORE_DISTRIBUTION: Final = "arb-ternary-core"


def discover() -> tuple[list[PluginRecord], list[str]]:
    """The plugin of every entry point on ``sys.path``, sorted by name, and a line on each distribution that is ignored.

    A distribution that is seen twice (an editable install beside a wheel, a path that is listed twice) counts once,
    and the first on the path counts, because that is the one that ``import`` finds. Only distributions with an entry
    in our group have their metadata parsed; one whose entry points cannot be read is a plugin that failed.
    """
    found: list[PluginRecord] = []
    notes: list[str] = []
    seen: dict[str, str] = {}
    for distribution in distributions():
        if GROUP not in _entry_points_text(distribution):
            continue
        name, version = _identity(distribution)
        key = canonical(name)
        if key in seen:
            notes.append(f"{name} {version} ignored: {seen[key]} comes first on sys.path")
            continue
        seen[key] = f"{name} {version}"
        record = PluginRecord(name=name, distribution=name, version=version)
        try:
            entries = [entry for entry in distribution.entry_points if entry.group == GROUP]
        except Exception as error:  # the parser raises whatever a malformed line makes it raise
            reason = f"its entry points cannot be read: {type(error).__name__}: {error}"
            found.append(evolve(record, status=Status.FAILED, reason=reason))
            continue
        found.extend(evolve(record, name=entry.name, module=entry.value.strip()) for entry in entries)
    if not any(record.module == BUILTIN_MODULE for record in found):
        # Imported from a source tree that was never installed: the program still needs its own parts.
        found.append(
            PluginRecord(name=BUILTIN, module=BUILTIN_MODULE, distribution=CORE_DISTRIBUTION, version=__version__)
        )
    return sorted(found, key=lambda record: (record.name, record.distribution or "")), notes


def announced() -> dict[str, str]:
    """The distribution of each component (``KIND.NAME``) that an installed distribution announces."""
    return {
        entry.name: canonical(entry.value)
        for distribution in distributions()
        if KNOWN_GROUP in _entry_points_text(distribution)
        for entry in distribution.entry_points
        if entry.group == KNOWN_GROUP
    }


def canonical(distribution: str) -> str:
    """A distribution's name in its normal form, in which two spellings of one name are equal."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _entry_points_text(distribution: Distribution) -> str:
    try:
        return distribution.read_text("entry_points.txt") or ""
    except UnicodeDecodeError:  # not UTF-8, so not written by any build tool: no entry of ours
        return ""


def _identity(distribution: Distribution) -> tuple[str, str]:
    """Name and version; damaged metadata must not keep this plugin's record, or another plugin, from being made."""
    metadata = dict(distribution.metadata.items())  # type: ignore[attr-defined]  # an email.message.Message
    return metadata.get("Name", "unnamed-distribution"), metadata.get("Version", "0")
