"""Wheels of every distribution of the workspace, and clean environments to install them into."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

ROOT = Path(__file__).parents[2]


@frozen
class Project:
    """A distribution of the workspace."""

    folder: Path
    metadata: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.metadata["name"])

    @property
    def native(self) -> bool:
        """Whether it has an extension module, which is compiled when its wheel is built."""
        return (self.folder / "CMakeLists.txt").exists()


def _projects() -> dict[str, Project]:
    files = [ROOT / "pyproject.toml", ROOT / "core" / "pyproject.toml"]
    files += sorted([*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("backends/*/pyproject.toml")])
    found = (Project(file.parent, tomllib.loads(file.read_text(encoding="utf-8"))["project"]) for file in files)
    return {project.name: project for project in found}


@pytest.fixture(scope="session")
def projects() -> dict[str, Project]:
    """Every distribution of the workspace by name; the first is the metapackage."""
    return _projects()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``project``: one test a distribution, so that a new plugin is tested without an edit."""
    if "project" in metafunc.fixturenames:
        projects = _projects()
        metafunc.parametrize("project", list(projects.values()), ids=list(projects))


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[Project], Path]:
    """Builds the wheel of a distribution, each once a session: workers share them, and none builds where one does.

    A native distribution is compiled in the folder of its editable installation, so that only what is new is compiled.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "wheels"
    folder.mkdir(exist_ok=True)

    def build(project: Project) -> Path:
        if project.native and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            pytest.skip("a native distribution needs a C++ compiler")
        out = folder / project.name
        with (folder / f"{project.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not out.exists():
                command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), "."]
                done = subprocess.run(
                    command, cwd=project.folder, env=_with_tools(), capture_output=True, text=True, check=False
                )
                assert done.returncode == 0, done.stdout + done.stderr
        (wheel,) = out.iterdir()
        return wheel

    return build


def _with_tools() -> dict[str, str]:
    """The environment with the tools of this interpreter's own environment first, as where it is activated."""
    scripts = sysconfig.get_path("scripts")
    return {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"}


@frozen
class Environment:
    """A virtual environment with everything that is installed here but our own distributions."""

    python: Path

    def pip(self, *arguments: str) -> str:
        """Run pip on this environment."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, wheel: Path) -> None:
        """Install a wheel, alone."""
        self.pip("install", "--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel))

    def arb(self, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the installed ``arb`` as a user does, with ``variables`` in the environment."""
        command = [str(self.python.with_name("arb")), *arguments]
        environment = {**_plain_environment(), **variables}
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)

    def run(self, code: str, *, cwd: Path) -> str:
        """What a Python program prints there."""
        command = [str(self.python), "-c", code]
        done = subprocess.run(command, cwd=cwd, env=_plain_environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


def _plain_environment() -> dict[str, str]:
    ours = ("ARB_", "PYTHON", "TRITON_", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


@pytest.fixture(scope="session")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that shows what is installed here, without our own distributions (and their ``.pth`` files)."""
    folder = tmp_path_factory.mktemp("third_party")
    for source in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(source).iterdir():
            ours = "arb_ternary" in entry.name or entry.suffix == ".pth"
            if not ours and entry.name != "__pycache__" and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture
def clean_environment(tmp_path: Path, third_party: Path) -> Environment:
    """A fresh virtual environment without any of our distributions."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "third_party.pth").write_text(f"{third_party}\n", encoding="utf-8")
    return Environment(folder / "bin" / "python")
