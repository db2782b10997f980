"""Find the installed plugins without importing any of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from arb_ternary import __version__
from arb_ternary.plugins.metadata import (
    InstalledDistribution,
    MetadataError,
    canonical,
    distributions,
    entry_points,
)
from arb_ternary.plugins.record import BUILTIN, BUILTIN_MODULE, PluginRecord

#: The entry-point group of plugins; the value of an entry is a hook module.
GROUP: Final = "arb_ternary.plugins"
#: The entry-point group in which a distribution says which distribution provides a component: the
#: name is ``KIND.NAME`` (or ``KIND.FAMILY``), the value is the import name of that distribution.
#: Nothing is imported through it.
KNOWN_GROUP: Final = "arb_ternary.known"
CORE_DISTRIBUTION: Final = "arb-ternary-core"
#: The distribution that brings the usual components, and announces all components of ours.
USUAL_PARTS: Final = "arb-ternary"


def discover() -> tuple[list[PluginRecord], list[str]]:
    """Return a record of every installed plugin, sorted by name, and notes for the trace.

    A distribution can be seen twice (an editable install and a wheel, or a path that is listed
    twice). It counts once: the first on the path is the one that ``import`` finds. A note tells of
    each that is ignored. A distribution whose entry points cannot be read is a plugin that failed.
    """
    found: list[PluginRecord] = []
    notes: list[str] = []
    seen: dict[str, str] = {}
    for distribution in distributions(GROUP):
        name = distribution.name
        version = distribution.version
        if canonical(name) in seen:
            first = seen[canonical(name)]
            notes.append(f"{name} {version} ignored: {first} comes first on sys.path")
            continue
        seen[canonical(name)] = f"{name} {version}"
        try:
            entries = distribution.entries(GROUP)
        except MetadataError as error:
            reason = f"its entry points cannot be read: {error}"
            found.append(PluginRecord(name=name, distribution=name, version=version, reason=reason))
            continue
        found += (
            PluginRecord(name=entry.name, distribution=name, version=version, module=entry.value)
            for entry in entries
        )
    if not any(record.is_core for record in found):
        # Imported from a source tree that was never installed: the program still needs its parts.
        found.append(
            PluginRecord(
                name=BUILTIN,
                distribution=CORE_DISTRIBUTION,
                version=__version__,
                module=BUILTIN_MODULE,
            )
        )
    return sorted(found, key=lambda record: (record.name, record.distribution or "")), notes


def version_conflicts(records: Sequence[PluginRecord]) -> dict[str, str]:
    """Return why plugins do not fit the distributions beside them, by distribution.

    pip keeps such installations from coming about, unless it is told to leave requirements out, or
    a folder on the path hides a distribution. Nothing is compared if all have one version: they
    were released together.
    """
    versions = {canonical(each.distribution or ""): each.version or "" for each in records}
    if len(set(versions.values())) == 1:
        return {}
    found = {}
    seen = set()
    for distribution in distributions(GROUP):
        name = distribution.name
        if canonical(name) not in seen:  # the first on the path is the one that counts
            seen.add(canonical(name))
            found[name] = _conflict(distribution, versions)
    return {name: conflict for name, conflict in found.items() if conflict}


def _conflict(distribution: InstalledDistribution, versions: Mapping[str, str]) -> str:
    """Return which installed version a distribution cannot work with; empty if there is none."""
    from packaging.requirements import InvalidRequirement, Requirement  # only here: it takes time
    from packaging.version import InvalidVersion

    for text in distribution.requirements:
        with suppress(InvalidRequirement, InvalidVersion):
            requirement = Requirement(text)
            version = versions.get(canonical(requirement.name))
            if version is None or requirement.marker is not None:
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                wanted = f"{requirement.name}{requirement.specifier}"
                command = install_command(wanted)
                return f"it needs {wanted}, and {version} is installed; {command} brings it"
    return ""


def announced() -> dict[str, str]:
    """Return the distribution of each component (``KIND.NAME``) that a distribution announces."""
    return {entry.name: canonical(entry.value) for entry in entry_points(KNOWN_GROUP)}


def install_command(requirement: str) -> str:
    """Return the command that installs a requirement, such as ``name[extra]>=1``, here.

    No index has our distributions if the usual parts were installed from a folder, such as a clone.
    The command then names that folder, with one of its own extras.
    """
    import shlex  # here and below: they take time at start-up, and only messages need them

    wanted = requirement
    name, _, extra = re.split(r"[]<>=!~; ]", requirement, maxsplit=1)[0].partition("[")
    for installed in distributions(KNOWN_GROUP):
        if canonical(installed.name) != USUAL_PARTS:
            continue
        source = _source_folder(installed.name, installed.folder)
        own = extra or name.removeprefix(f"{USUAL_PARTS}-")
        lines = installed.metadata.splitlines()
        if source and name.startswith(f"{USUAL_PARTS}-") and f"Provides-Extra: {own}" in lines:
            wanted = f"{source}[{own}]"
        elif source and any(line.startswith(f"Requires-Dist: {name} @ ") for line in lines):
            wanted = source
    return f"pip install {shlex.quote(wanted)}"


def _source_folder(distribution: str, site: str) -> str:
    """Return the folder that a distribution was installed from; empty if it was not a folder.

    Args:
        distribution: its name.
        site: the entry of ``sys.path`` that it was found in.
    """
    import json
    from importlib import metadata
    from urllib.request import url2pathname

    for found in metadata.distributions(name=distribution, path=[site]):
        origin = json.loads(found.read_text("direct_url.json") or "{}")
        if "dir_info" in origin:
            return str(url2pathname(origin["url"].removeprefix("file://")))
    return ""
