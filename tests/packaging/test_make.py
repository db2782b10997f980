"""Test `make demo` on a machine with a C++ compiler, and without one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def lines_of_demo(tmp_path: Path, *variables: str) -> list[str]:
    """Return the commands of `make demo` in a new clone."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-n", "demo", f"VENV={tmp_path / 'venv'}", *variables]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_demo_builds_the_native_backend_if_it_can(tmp_path: Path) -> None:
    lines = lines_of_demo(tmp_path, "COMPILER=c++")
    told = next(
        number
        for number, line in enumerate(lines)
        if "native backend with c++: about half a minute" in line
    )
    built = next(
        number
        for number, line in enumerate(lines)
        if line.endswith("--editable backends/arb-ternary-cpu")
    )
    trained = next(
        number for number, line in enumerate(lines) if "arb train docs/examples/demo.yaml" in line
    )
    assert told < built < trained


def test_without_a_compiler_the_demo_says_so_and_trains(tmp_path: Path) -> None:
    lines = lines_of_demo(tmp_path, "COMPILER=")
    assert any("No C++ compiler" in line for line in lines)
    assert not any("backends/arb-ternary-cpu" in line for line in lines)
    assert any("arb train docs/examples/demo.yaml" in line for line in lines)


def test_the_config_of_the_demo_leaves_the_backend_open() -> None:
    assert "\nbackend:" not in (ROOT / "docs" / "examples" / "demo.yaml").read_text(
        encoding="utf-8"
    )
