"""The metadata of installed distributions, read without importing ``importlib.metadata``.

That module imports the parsers of e-mails, archives and tables, which takes a fifth of the time of
``arb --help``. It is only used if something other than folders provides distributions. For the same
reason ``pathlib`` is not used here.
"""

# ruff: noqa: PTH113, PTH118, PTH123, PTH208

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder

from attrs import frozen


class MetadataError(Exception):
    """The entry points of a distribution cannot be read."""


@frozen
class EntryPoint:
    """An entry point: a name, and a value such as ``module:attribute``."""

    name: str
    value: str


@frozen
class InstalledDistribution:
    """A distribution that is installed.

    Attributes:
        folder: the entry of ``sys.path`` that it was found in.
        metadata: the text of its ``METADATA``.
        entry_points: the text of its ``entry_points.txt``.
    """

    folder: str
    metadata: str
    entry_points: str

    @property
    def name(self) -> str:
        """The name as its metadata spell it."""
        return self._header("Name", "unnamed-distribution")

    @property
    def version(self) -> str:
        """The version."""
        return self._header("Version", "0")

    @property
    def requirements(self) -> list[str]:
        """The requirements, as its metadata spell them."""
        head = self.metadata.partition("\n\n")[0]
        return re.findall(r"^Requires-Dist: *(.*?) *$", head, re.MULTILINE)

    def entries(self, group: str) -> list[EntryPoint]:
        """Return the entry points of a group.

        Raises:
            MetadataError: a line of the group is malformed.
        """
        found = []
        section = None
        for line in map(str.strip, self.entry_points.splitlines()):
            if line.startswith("[") and line.endswith("]"):
                section = line[1:-1].strip()
            elif section == group and line and not line.startswith(("#", ";")):
                name, equals, value = line.partition("=")
                if not (equals and name.strip() and value.strip()):
                    raise MetadataError(f"{line!r} is not written name = value")
                found.append(EntryPoint(name.strip(), value.strip()))
        return found

    def _header(self, key: str, default: str) -> str:
        """Return a field of the metadata, which end at the first empty line."""
        head = self.metadata.partition("\n\n")[0]
        found = re.search(rf"^{key}:(.*)$", head, re.MULTILINE)
        return found[1].strip() if found else default


def canonical(distribution: str) -> str:
    """Return the normal form of a distribution's name: two spellings of one name become equal."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def distributions(group: str) -> Iterator[InstalledDistribution]:
    """Yield the installed distributions that have entry points in a group.

    They come in the order of ``sys.path``. One that is on it twice is yielded twice.
    """
    search = _installed_otherwise if _needs_importlib() else _installed_in_folders
    for distribution in search():
        if group in distribution.entry_points:
            yield distribution


def entry_points(group: str) -> Iterator[EntryPoint]:
    """Yield the entry points of a group, of all distributions; malformed ones are left out."""
    for distribution in distributions(group):
        with suppress(MetadataError):
            yield from distribution.entries(group)


def _needs_importlib() -> bool:
    """Whether an archive, or an import hook of another program, may provide distributions."""
    hooks = [finder for finder in sys.meta_path if hasattr(finder, "find_distributions")]
    if hooks != [PathFinder]:
        return True
    return any(os.path.isfile(entry) for entry in sys.path)


def _installed_in_folders() -> Iterator[InstalledDistribution]:
    for entry in sys.path:
        try:
            names = sorted(os.listdir(entry or "."))
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                folder = os.path.join(entry, name)
                # Most distributions have no entry points, which saves reading their metadata.
                if entry_points := _text(f"{folder}/entry_points.txt"):
                    metadata = _text(f"{folder}/METADATA") or _text(f"{folder}/PKG-INFO")
                    yield InstalledDistribution(entry, metadata, entry_points)


def _installed_otherwise() -> Iterator[InstalledDistribution]:
    for found in import_module("importlib.metadata").distributions():
        texts = []
        for names in (("METADATA", "PKG-INFO"), ("entry_points.txt",)):
            try:
                texts.append(next(filter(None, map(found.read_text, names)), ""))
            except UnicodeDecodeError:
                texts.append("")
        yield InstalledDistribution(str(found.locate_file("")), *texts)


def _text(path: str) -> str:
    """Return the text of a file; empty if it is not there.

    A file that is not UTF-8 was not written by any build tool, and holds nothing of ours.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""
