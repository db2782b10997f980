"""Write a distribution with one working component and its tests: ``arb plugins new``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import Final

from arb_ternary import API_VERSION, __version__
from arb_ternary.errors import ArbError, UsageProblem, nearest
from arb_ternary.plugins.discovery import announced
from arb_ternary.plugins.manager import manager
from arb_ternary.plugins.metadata import canonical

#: Kinds of plugin that have a template, and what each is.
KINDS: Final = {
    "backend": "a kernel backend",
    "data": "a data source",
    "masking": "a masking strategy",
    "model": "a model",
    "optimizer": "an optimizer of float parameters",
    "phase": "a trainer phase",
    "tracker": "a tracker of runs",
    "vote-rule": "a vote rule, an optimizer of ternary weights",
}
#: The distribution that a kind needs in addition to the core.
_NEEDED: Final = {"data": "text", "phase": "train"}

PREFIX: Final = "arb-ternary-"
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_SUFFIX: Final = ".template"


def new_plugin(name: str, kind: str, destination: Path = Path()) -> Path:
    """Write the distribution ``arb-ternary-<name>`` into a folder of that name in ``destination``.

    The folder appears complete or not at all.

    Args:
        name: short name: lower-case words joined by hyphens, with or without the prefix
            ``arb-ternary-``.
        kind: one of ``KINDS``.
        destination: parent of the folder; created if it does not exist.

    Returns:
        The folder.

    Raises:
        UsageProblem: the name cannot be a distribution's or is taken, the kind is unknown, or the
            folder is not empty.
        ArbError: the folder cannot be written.
    """
    if kind not in KINDS:
        close = nearest(kind, KINDS)
        suggestion = f"did you mean {close!r}?\n" if close else ""
        raise UsageProblem(
            f"there is no template for a {kind}", f"{suggestion}templates: {', '.join(KINDS)}"
        )
    short = _checked(name)
    target = destination / f"{PREFIX}{short}"
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageProblem(
            f"{target}: already exists and is not an empty folder", "choose another name or --into"
        )
    try:
        destination.mkdir(parents=True, exist_ok=True)
        # In the same folder, so that the rename stays within one file system.
        with TemporaryDirectory(dir=destination, prefix=".arb-ternary-new-") as temporary:
            built = Path(temporary, target.name)
            for path, text in _rendered(kind, _values(short, kind)):
                file = built / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            if target.exists():
                target.rmdir()
            built.rename(target)
    except OSError as error:
        raise ArbError(f"{target}: cannot be written: {error}") from error
    return target


def _checked(name: str) -> str:
    """Return ``name`` without the prefix.

    Raises:
        UsageProblem: the name is not valid, or it belongs to an existing distribution.
    """
    short = name.removeprefix(PREFIX)
    if not _NAME.fullmatch(short):
        words = re.sub(r"[^a-z0-9]+", "-", short.lower())
        words = words.strip("-").lstrip("0123456789-")
        suggestion = f"use {words!r}" if words else "for example 'my-optimizer'"
        raise UsageProblem(
            f"{name!r} cannot be the name of a plugin: it must be lower-case letters and digits, "
            "beginning with a letter, with single hyphens between words",
            suggestion,
        )
    taken = set(announced().values())
    for record in manager().records:
        if record.distribution:
            taken.add(canonical(record.distribution))
    if f"{PREFIX}{short}" in taken:
        raise UsageProblem(
            f"{PREFIX}{short} is the name of an existing distribution", "choose another name"
        )
    return short


def _values(short: str, kind: str) -> dict[str, str]:
    """Return the values of the placeholders of the templates."""
    words = short.split("-")
    minor_version = __version__.rpartition(".")[0]
    versions = f">={minor_version},<{API_VERSION[0] + 1}"
    parts = ["core"]
    if kind in _NEEDED:
        parts.append(_NEEDED[kind])
    needed = [f'"{PREFIX}{part}{versions}"' for part in parts]
    return {
        "name": short,
        "distribution": f"{PREFIX}{short}",
        "package": "_".join(["arb_ternary", *words]),
        "component": "_".join(words),
        "class_name": "".join(word.capitalize() for word in words),
        "a_kind": KINDS[kind],
        "versions": versions,
        "needed": ", ".join(needed),
        "api_version": repr(API_VERSION),
    }


def _rendered(kind: str, values: dict[str, str]) -> Iterator[tuple[Path, str]]:
    """Return path and text of every file. A file of the kind replaces a common file."""
    templates = files("arb_ternary_testing.scaffold") / "templates"
    found: dict[Path, str] = {}
    for folder in ("common", kind):
        for path, template in _walk(templates / folder, Path()):
            names = [part.replace("dot_", ".", 1) for part in path.parts]
            parts = [values["package"] if name == "PACKAGE" else name for name in names]
            text = template.read_text(encoding="utf-8")
            found[Path(*parts)] = Template(text).substitute(values)
    yield from sorted(found.items())


def _walk(folder: Traversable, path: Path) -> Iterator[tuple[Path, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, path / entry.name)
        elif entry.name.endswith(_SUFFIX):
            yield path / entry.name.removesuffix(_SUFFIX), entry
