"""Install fake plugins: folders with a module and a ``.dist-info``, which make a distribution.

This takes a millisecond. Building and installing a wheel takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from arb_ternary.plugins.discovery import GROUP

#: The least that a run directory records: ``RunDirectory(path).create(config, RUN_RECORD, {})``.
RUN_RECORD: Final[Mapping[str, Any]] = {
    "seed": 1,
    "backend": {"name": "torch"},
    "data": {"name": "text", "fingerprint": None},
    "threads": {"loops": {}, "last": None},
    "versions": {},
    "vocabulary_size": 256,
}


def install_fake_plugin(
    folder: Path,
    distribution: str,
    files: Mapping[str, str],
    *,
    entry_points: Mapping[str, str] | None = None,
    version: str = "1.0",
    requires: tuple[str, ...] = (),
) -> Path:
    """Lay out an installed distribution in ``folder`` and return ``folder``.

    Put the folder on ``sys.path`` to use the distribution.

    Args:
        folder: stands in for ``site-packages``; created if it does not exist. It may hold several
            distributions.
        distribution: the distribution's name, ``arb-ternary-x``.
        files: text of the modules by path relative to ``folder``, ``{"arb_ternary_x/plugin.py":
            "..."}``. Folders that hold a module are packages: an empty ``__init__.py`` is added if
            the files have none.
        entry_points: hook module by entry-point name. By default there is one, named after the
            distribution, whose module is the first file.
        version: version of the distribution.
        requires: requirement lines of its metadata.
    """
    written = dict(files)
    for name in files:
        for parent in Path(name).parents:
            if parent != Path():
                written.setdefault((parent / "__init__.py").as_posix(), "")
    if entry_points is None:
        first_file = next(iter(files))
        module = ".".join(Path(first_file).with_suffix("").parts)
        entry_points = {distribution.removeprefix("arb-ternary-"): module}

    info = f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    written[f"{info}/METADATA"] = "\n".join([*metadata, ""])
    lines = [f"{name} = {module}" for name, module in entry_points.items()]
    written[f"{info}/entry_points.txt"] = "\n".join([f"[{GROUP}]", *lines, ""])

    for name, text in written.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
