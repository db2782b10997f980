"""The metapackage announces every component of the workspace with the distribution that brings
it.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from arb_ternary.plugins import metadata
from arb_ternary.plugins.manager import manager

ROOT = Path(__file__).parents[2]


def test_every_component_that_is_not_the_cores_is_announced() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    announced = project["entry-points"]["arb_ternary.known"]
    workspace = {folder.name for folder in ROOT.glob("*/arb-ternary-*")}
    expected = {}
    for found in manager().registry.everything():
        if found.distribution in workspace:
            # announced as one, except for commands, which stand in groups
            family = found.name.partition(".")[0]
            name = found.name if found.kind == "command" else family
            expected[f"{found.kind}.{name}"] = str(found.distribution).replace("-", "_")
    for record, document in manager().registry.results("arb_register_documents"):
        if record.distribution in workspace:
            expected[f"document.{document.name}"] = str(record.distribution).replace("-", "_")
    for folder in ROOT.glob("*/arb-ternary-*"):
        own = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        added = own.get("entry-points", {}).get("arb_ternary.names", {})
        expected |= {f"name.{name}": own["name"].replace("-", "_") for name in added}
    assert announced == expected


def test_a_name_that_is_not_installed_says_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda _: ())
    with pytest.raises(
        ImportError,
        match=r"arb_ternary.TernaryConv2d is not installed: pip install arb-ternary-vision",
    ):
        from arb_ternary import TernaryConv2d  # noqa: F401
