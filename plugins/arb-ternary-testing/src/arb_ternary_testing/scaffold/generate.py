"""``arb plugins new``: writes a distribution with one component that works, and its tests."""

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
from arb_ternary.specs import KINDS as SPECS

#: Kinds of component that there is a template for.
KINDS: Final = ("backend", "masking", "optimizer", "phase")

PREFIX: Final = "arb-ternary-"
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_SUFFIX: Final = ".template"


def new_plugin(name: str, kind: str, destination: Path = Path()) -> Path:
    """Write the distribution ``arb-ternary-<name>`` into a folder of that name in ``destination``.

    The folder appears complete or not at all.

    Args:
        name: short name, lower-case words with hyphens between them; the prefix ``arb-ternary-``
            may stand before it.
        kind: ``backend``, ``masking``, ``optimizer`` or ``phase``.
        destination: where the folder is made; made itself where it does not exist.

    Returns:
        The folder.

    Raises:
        UsageProblem: a name that cannot be a distribution's or is taken, an unknown kind, a folder
            that is not empty.
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
    """The short name.

    Raises:
        UsageProblem: it is not one, or belongs to a distribution that exists.
    """
    short = name.removeprefix(PREFIX)
    if not _NAME.fullmatch(short):
        words = re.sub(r"[^a-z0-9]+", "-", short.lower()).strip("-").lstrip("0123456789-")
        suggestion = f"{words!r} would do" if words else "for example 'my-optimizer'"
        raise UsageProblem(
            f"{name!r} cannot be the name of a plugin: it must be lower-case letters and digits, "
            "beginning with a letter, with single hyphens between words",
            suggestion,
        )
    installed = {
        canonical(record.distribution) for record in manager().records if record.distribution
    }
    if f"{PREFIX}{short}" in installed | set(announced().values()):
        raise UsageProblem(
            f"{PREFIX}{short} is the name of an existing distribution", "choose another name"
        )
    return short


def _values(short: str, kind: str) -> dict[str, str]:
    """What stands for the placeholders of the templates."""
    words = short.split("-")
    noun = next(spec.noun for spec in SPECS if spec.kind == kind)
    versions = f">={__version__.rpartition('.')[0]},<{API_VERSION[0] + 1}"
    needed = ["core", "train"] if kind == "phase" else ["core"]
    return {
        "name": short,
        "distribution": f"{PREFIX}{short}",
        "package": "_".join(["arb_ternary", *words]),
        "component": "_".join(words),
        "class_name": "".join(word.capitalize() for word in words),
        "kind": kind,
        "a_kind": f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}",
        "versions": versions,
        "needed": ", ".join(f'"{PREFIX}{part}{versions}"' for part in needed),
        "api_version": repr(API_VERSION),
    }


def _rendered(kind: str, values: dict[str, str]) -> Iterator[tuple[Path, str]]:
    """Path and text of every file, those of the kind over those of every kind."""
    found: dict[Path, str] = {}
    for folder in ("common", kind):
        for path, template in _walk(
            files("arb_ternary_testing.scaffold") / "templates" / folder, Path()
        ):
            parts = [
                values["package"] if part == "PACKAGE" else part.replace("dot_", ".", 1)
                for part in path.parts
            ]
            found[Path(*parts)] = Template(template.read_text(encoding="utf-8")).substitute(values)
    yield from sorted(found.items())


def _walk(folder: Traversable, path: Path) -> Iterator[tuple[Path, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, path / entry.name)
        elif entry.name.endswith(_SUFFIX):
            yield path / entry.name.removesuffix(_SUFFIX), entry
