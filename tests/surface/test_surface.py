"""Test that surface.txt is the public surface, and that what follows from it is up to date."""

from __future__ import annotations

import difflib
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from arb_ternary.plugins import metadata

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_public_surface_equals_the_snapshot() -> None:
    # In a new process: other tests may have registered something in this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ARB_")}
    done = subprocess.run(
        [sys.executable, str(HERE / "surface.py")],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    recorded = (HERE / "surface.txt").read_text(encoding="utf-8")
    changes = list(
        difflib.unified_diff(
            recorded.splitlines(), done.stdout.splitlines(), "surface.txt", "now", n=0, lineterm=""
        )
    )
    assert not changes, "\n".join(
        [
            "the public surface has changed:",
            *changes,
            "",
            "A removed or renamed line breaks other people's plugins, configs or scripts: it needs "
            "a deprecation and",
            "an entry in CHANGELOG.md. If the change is meant: make generate",
        ]
    )


def test_metapackage_announces_every_component() -> None:
    spec = importlib.util.spec_from_file_location("surface", HERE / "surface.py")
    assert spec is not None
    assert spec.loader is not None
    surface = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(surface)
    written = []
    for file in (ROOT / "core" / "pyproject.toml", ROOT / "pyproject.toml"):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        written.append(project["entry-points"]["arb_ternary.known"])
    snapshot = (HERE / "surface.txt").read_text(encoding="utf-8")
    assert tuple(written) == surface.known_tables(snapshot), "run: make generate"


def test_missing_name_says_which_package_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda _: {})
    with pytest.raises(
        ImportError,
        match=r"arb_ternary.TernaryConv2d is not installed: pip install .*vision",
    ):
        from arb_ternary import TernaryConv2d  # noqa: F401
