"""The version of all distributions, and its script."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]


def version_of(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts" / "version.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return a copy of the files that a version stands in."""
    files = [ROOT / "pyproject.toml", ROOT / "scripts" / "version.py"]
    for pattern in ("core", "plugins/*", "backends/*"):
        files += ROOT.glob(f"{pattern}/pyproject.toml")
        files += ROOT.glob(f"{pattern}/src/*/__init__.py")
    for file in files:
        place = tmp_path / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    return tmp_path


def test_all_distributions_have_one_version() -> None:
    checked = version_of(ROOT, "--check")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("version", ["0.2.0", "0.2.0rc1", "1.3.0"])
def test_a_new_version_is_written_everywhere(copied: Path, version: str) -> None:
    before = {file: file.read_bytes() for file in copied.rglob("*.*") if file.is_file()}
    old = version_of(copied).stdout.strip()
    assert version_of(copied, version).returncode == 0
    assert version_of(copied).stdout.strip() == version
    assert version_of(copied, "--check").returncode == 0
    for file in copied.rglob("*.toml"):
        for text in re.findall(r'"(arb-ternary-[^"]*[=<>][^"]*)"', file.read_text("utf-8")):
            assert Requirement(text).specifier.contains(Version(version), prereleases=True), file
    for file in copied.rglob("__init__.py"):
        assert f'__version__ = "{version}"' in file.read_text("utf-8"), file
    assert version_of(copied, old).returncode == 0
    assert all(file.read_bytes() == content for file, content in before.items())


def test_a_distribution_with_another_version_is_named(copied: Path) -> None:
    file = copied / "plugins" / "arb-ternary-votes" / "src" / "arb_ternary_votes" / "__init__.py"
    text = file.read_text("utf-8")
    file.write_text(re.sub('__version__ = ".*"', '__version__ = "9.0.0"', text), "utf-8")
    checked = version_of(copied, "--check")
    assert checked.returncode == 1
    assert str(file.relative_to(copied)) in checked.stderr


def test_what_is_no_version_is_refused(copied: Path) -> None:
    refused = version_of(copied, "next")
    assert refused.returncode == 2
    assert "'next' is no version such as 0.2.0" in refused.stderr
