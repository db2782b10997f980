"""Fake installed plugins: a folder with a module and ``.dist-info`` is an installed distribution to
Python.

Building and installing a wheel for every test of the loader would take seconds; this takes a
millisecond.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from arb_ternary.plugins.discovery import GROUP


def install_fake_plugin(
    folder: Path,
    distribution: str,
    files: Mapping[str, str],
    *,
    entry_points: Mapping[str, str] | None = None,
    version: str = "1.0",
    requires: tuple[str, ...] = (),
) -> Path:
    """Lay out an installed distribution in ``folder`` and return ``folder``, to be put on
    ``sys.path``.

    Args:
        folder: a stand-in for ``site-packages``; made where it does not exist. It may hold several
            distributions.
        distribution: the distribution's name, ``arb-ternary-x``.
        files: text by path relative to ``folder``: the modules, ``{"arb_ternary_x/plugin.py":
            "..."}``. Folders that hold a module are packages: an empty ``__init__.py`` is added
            where the files have none.
        entry_points: hook module by entry-point name; by default one that is named after the first
            file.
        version: of the distribution.
        requires: requirement lines of its metadata.
    """
    written = dict(files)
    for name in files:
        for parent in Path(name).parents:
            if parent != Path():
                written.setdefault((parent / "__init__.py").as_posix(), "")
    if entry_points is None:
        module = ".".join(Path(next(iter(files))).with_suffix("").parts)
        entry_points = {distribution.removeprefix("arb-ternary-"): module}
    info = f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
    written[f"{info}/METADATA"] = "\n".join(
        [*metadata, *(f"Requires-Dist: {line}" for line in requires), ""]
    )
    listed = "\n".join(f"{name} = {module}" for name, module in entry_points.items())
    written[f"{info}/entry_points.txt"] = f"[{GROUP}]\n{listed}\n"
    for name, text in written.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
