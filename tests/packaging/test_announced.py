"""The metapackage announces every component of the workspace with the distribution that brings it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from arb_ternary.plugins.manager import manager

ROOT = Path(__file__).parents[2]


def test_every_component_that_is_not_the_cores_is_announced() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    announced = project["entry-points"]["arb_ternary.known"]
    workspace = {folder.name for folder in ROOT.glob("*/arb-ternary-*")}
    expected = {}
    for found in manager().registry.everything():
        if found.distribution in workspace:
            family = found.name.partition(".")[0]  # announced as one, except for commands, which stand in groups
            name = found.name if found.kind == "command" else family
            expected[f"{found.kind}.{name}"] = str(found.distribution).replace("-", "_")
    assert announced == expected
