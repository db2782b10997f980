"""Texts that come with Python, for studies of models on what nothing was tuned on."""

from __future__ import annotations

import sysconfig
from pathlib import Path


def help_topics() -> str:
    """The topics of Python's own ``help()``, under the PSF licence; they differ between versions of
    Python.
    """
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def library_source(longest: int | None = None, folder: Path | None = None) -> str:
    """The modules of Python's standard library that are single files, in the order of their names.

    They are under the PSF licence and differ between versions of Python: 4.7 million characters
    with Python 3.11.

    Args:
        longest: characters of it, at most; None = all.
        folder: where the modules lie; None = where this Python has them.
    """
    return python_source(folder or Path(sysconfig.get_path("stdlib")), "*.py")[:longest]


def python_source(folder: Path, pattern: str) -> str:
    """The modules of a folder whose paths match a pattern of ``Path.glob``, in the order of their
    paths.
    """
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob(pattern)))


def divide_text(text: str, folder: Path, prefix: str = "") -> dict[str, Path]:
    """Write a text in three files, and return them by name.

    They are ``train``, four fifths to train on; ``choice``, a tenth to choose settings by; and
    ``validation``, the last tenth, to measure on.

    Args:
        text: the whole.
        folder: where the files go; those that are there are replaced.
        prefix: their names begin with this.
    """
    cuts = [0, len(text) * 8 // 10, len(text) * 9 // 10, len(text)]
    files = {}
    for name, first, last in zip(("train", "choice", "validation"), cuts, cuts[1:], strict=False):
        files[name] = folder / f"{prefix}{name}.txt"
        files[name].write_text(text[first:last], encoding="utf-8")
    return files
