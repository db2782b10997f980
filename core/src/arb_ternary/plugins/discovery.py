"""Find the installed plugins without importing any of them."""

from __future__ import annotations

import re
from typing import Final

from arb_ternary import __version__
from arb_ternary.plugins.metadata import canonical, distributions, entry_points
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
    each that is ignored. An entry point that cannot be read is a plugin that failed.
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
        for plugin, module in distribution.entries:
            record = PluginRecord(name=plugin, distribution=name, version=version, module=module)
            if not (plugin and module):
                record.name = name
                line = repr(plugin or module)
                record.reason = f"its entry points cannot be read: {line} is not name = value"
            found.append(record)
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


def announced() -> dict[str, str]:
    """Return the distribution of each component (``KIND.NAME``) that a distribution announces."""
    return {name: canonical(owner) for name, owner in entry_points(KNOWN_GROUP).items()}


def install_command(requirement: str) -> str:
    """Return the command that installs a requirement, such as ``name[extra]>=1``, here.

    No index has our distributions if the usual parts were installed from a folder, such as a clone.
    The command then names that folder, with one of its own extras.
    """
    # Imported here, because they take time at start-up and only messages need them.
    import json
    import shlex
    from importlib import metadata
    from urllib.request import url2pathname

    name, _, extra = re.split(r"[]<>=!~; ]", requirement, maxsplit=1)[0].partition("[")
    parts = next(iter(metadata.distributions(name=USUAL_PARTS)), None)
    wanted = requirement
    if parts is not None and name.startswith(f"{USUAL_PARTS}-"):
        origin = json.loads(parts.read_text("direct_url.json") or "{}")
        own = extra or name.removeprefix(f"{USUAL_PARTS}-")
        if "dir_info" in origin:
            source = url2pathname(origin["url"].removeprefix("file://"))
            if own in parts.metadata.get_all("Provides-Extra", ()):
                wanted = f"{source}[{own}]"
            elif any(line.startswith(f"{name} @ ") for line in parts.requires or ()):
                wanted = source
    return f"pip install {shlex.quote(wanted)}"
