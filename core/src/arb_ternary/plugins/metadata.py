"""The entry points of installed distributions, read without ``importlib.metadata``.

That module, and ``pathlib``, would make ``arb --help`` a third slower. Only folders on ``sys.path``
are searched: no plugin is found in an archive.
"""

# ruff: noqa: PTH118, PTH123, PTH208

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

from attrs import frozen


@frozen
class InstalledDistribution:
    """A distribution that has entry points of a group.

    Attributes:
        folder: the entry of ``sys.path`` that it was found in.
        name: the name as its metadata spell it.
        version: the version.
        entries: name and value of each entry point of the group; the value is empty for a line that
            is not written ``name = value``.
    """

    folder: str
    name: str
    version: str
    entries: list[tuple[str, str]]


def canonical(distribution: str) -> str:
    """Return the normal form of a distribution's name: two spellings of one name become equal."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def distributions(group: str) -> Iterator[InstalledDistribution]:
    """Yield the installed distributions that have entry points in a group.

    They come in the order of ``sys.path``. One that is on it twice is yielded twice.
    """
    for folder in sys.path:
        try:
            names = sorted(os.listdir(folder or "."))
        except OSError:
            continue
        for entry in names:
            if not entry.endswith((".dist-info", ".egg-info")):
                continue
            path = os.path.join(folder, entry)
            # Most distributions have no entry points, which saves reading their metadata.
            text = _text(f"{path}/entry_points.txt")
            if group in text:
                metadata = _text(f"{path}/METADATA") or _text(f"{path}/PKG-INFO")
                name = _header(metadata, "Name") or "unnamed-distribution"
                version = _header(metadata, "Version") or "0"
                yield InstalledDistribution(folder, name, version, _entries(text, group))


def entry_points(group: str) -> dict[str, str]:
    """Return the entry points of a group, of all distributions; the first of a name counts."""
    found: dict[str, str] = {}
    for distribution in distributions(group):
        for name, value in distribution.entries:
            found.setdefault(name, value)
    return found


def _entries(text: str, group: str) -> list[tuple[str, str]]:
    """Return name and value of the entry points of a group."""
    found = []
    section = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1].strip()
        elif section == group and line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            found.append((name.strip(), value.strip()))
    return found


def _header(metadata: str, key: str) -> str:
    """Return a field of the metadata, which end at the first empty line; empty if it is absent."""
    head = metadata.partition("\n\n")[0]
    found = re.search(rf"^{key}:(.*)$", head, re.MULTILINE)
    return found[1].strip() if found else ""


def _text(path: str) -> str:
    """Return the text of a file; empty if it is not there.

    A file that is not UTF-8 was not written by any build tool, and holds nothing of ours.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""
