"""The public surface is what surface.txt says."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_the_public_surface_is_the_one_in_the_snapshot() -> None:
    # In a process of its own: the surface of an untouched interpreter, whatever other tests have
    # registered.
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
