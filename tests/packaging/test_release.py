"""What a tag builds and publishes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"


def jobs(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((WORKFLOWS / name).read_text("utf-8"))["jobs"]
    return found


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("linux", {f"{tag}-manylinux_{arch}" for tag in ("cp311", "cp312") for arch in
                   ("x86_64", "aarch64")}),
        ("macos", {"cp311-macosx_arm64", "cp312-macosx_arm64"}),
    ],
)  # fmt: skip
def test_native_wheels_of_a_release(platform: str, expected: set[str]) -> None:
    pytest.importorskip("cibuildwheel")
    command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform"]
    done = subprocess.run(
        [*command, platform, str(ROOT / "backends" / "arb-ternary-cpu")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) == expected


def test_a_push_runs_what_a_clone_runs() -> None:
    assert commands(jobs("test.yml")["test"]) == [".ci/run"]


def test_commands_of_the_release_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for name in ("dist", "docs"):
        assert f"\n{name}: " in makefile
    others = "\n".join(commands(jobs("release.yml")["others"]))
    assert "make dist docs" in others
    assert 'test "v$(python scripts/version.py)" = "$GITHUB_REF_NAME"' in others
    native = "\n".join(commands(jobs("release.yml")["native"]))
    assert "cibuildwheel backends/arb-ternary-cpu" in native


def test_only_uploads_may_ask_for_an_identity() -> None:
    release = yaml.safe_load((WORKFLOWS / "release.yml").read_text("utf-8"))
    assert release["permissions"] == {"contents": "read"}
    asking = {
        name for name, job in release["jobs"].items() if "id-token" in job.get("permissions", {})
    }
    assert asking == {"publish", "docs"}
    assert set(release["jobs"]["publish"]["needs"]) == {"native", "others"}
