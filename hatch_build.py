"""The requirements of the metapackage: by version in a release, by place in a clone of this
repository.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ClonedRequirements(MetadataHookInterface):
    """Fills in the requirements that stand in the hook's own table in ``pyproject.toml``.

    A distribution that lies in the clone is required as ``name @ file:///...``, so that ``pip
    install .`` installs the clone, whatever a package index has. An index takes no such
    requirement: with ``RELEASE=1`` in the environment, and where the folders are missing, as in an
    sdist, the requirements stay what they are.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``dependencies`` and ``optional-dependencies``."""
        folders = {} if os.environ.get("RELEASE") == "1" else _folders(Path(self.root))
        metadata["dependencies"] = [_placed(each, folders) for each in self.config["dependencies"]]
        metadata["optional-dependencies"] = {
            extra: [_placed(each, folders) for each in requirements]
            for extra, requirements in self.config["optional-dependencies"].items()
        }


def _folders(root: Path) -> dict[str, Path]:
    """The folder of each distribution in the clone, by the distribution's name."""
    files = [
        path
        for pattern in ("core", "plugins/*", "backends/*")
        for path in root.glob(f"{pattern}/pyproject.toml")
    ]
    return {
        tomllib.loads(path.read_text(encoding="utf-8"))["project"]["name"]: path.parent
        for path in files
    }


def _placed(requirement: str, folders: dict[str, Path]) -> str:
    text, semicolon, marker = requirement.partition(";")
    match = re.match(r"([\w.-]+)(\[.*?\])?", text)
    if match is None or match[1] not in folders:
        return requirement
    # pip takes the last part of `.../arb-ternary-votes` for a name with a version, and would
    # install the wheel that it once built there for ever; it keeps none of
    # `.../arb-ternary-votes/.`.
    return f"{match[0]} @ {folders[match[1]].as_uri()}/.{' ;' if semicolon else ''}{marker}"
