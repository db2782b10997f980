"""Build wheels of every distribution, and make clean environments to install them into."""

from __future__ import annotations

import fcntl
import json
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
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FRONT_END = ("build", "--wheel", "--no-isolation", "--outdir")
#: The command that the front end calls. It takes half the time and builds the same wheel.
BACK_END = ("hatchling", "build", "-t", "wheel", "-d")


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
        """Whether it has an extension module, which building its wheel compiles."""
        return (self.folder / "CMakeLists.txt").exists()

    def requirements(self, *extras: str) -> list[Requirement]:
        """Return its requirements with extras. The root's are in the table of its metadata hook."""
        found = self.metadata if "dependencies" in self.metadata else self.metadata["hook"]
        optional = found.get("optional-dependencies", {})
        texts = [
            *found["dependencies"],
            *(text for extra in extras for text in optional.get(extra, ())),
        ]
        return [Requirement(text) for text in texts]


def closure(projects: Mapping[str, Project], name: str, *extras: str) -> dict[str, Project]:
    """Return the distribution ``name`` and all distributions of this repository that it needs."""
    found: dict[str, Project] = {}
    waiting = [(name, extras)]
    while waiting:
        name, wanted = waiting.pop()
        found[name] = projects[name]
        for requirement in projects[name].requirements(*wanted):
            needed = canonicalize_name(requirement.name)
            if needed in projects and needed not in found:
                waiting.append((needed, tuple(requirement.extras)))
    return found


def _projects() -> dict[str, Project]:
    files = [ROOT / "pyproject.toml", ROOT / "core" / "pyproject.toml"]
    files += sorted(
        [*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("backends/*/pyproject.toml")]
    )
    tables = {file.parent: tomllib.loads(file.read_text(encoding="utf-8")) for file in files}
    hook = tables[ROOT]["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    metadata = {folder: table["project"] for folder, table in tables.items()}
    metadata[ROOT]["hook"] = hook
    return {table["name"]: Project(folder, table) for folder, table in metadata.items()}


@pytest.fixture(scope="session")
def projects() -> dict[str, Project]:
    """Return every distribution of the workspace by name; the first is the metapackage."""
    return _projects()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests with ``project`` once per distribution; a new plugin is tested without an edit."""
    if "project" in metafunc.fixturenames:
        projects = _projects()
        metafunc.parametrize("project", list(projects.values()), ids=list(projects))


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[Project], Path]:
    """Return a function that builds the wheel of a distribution, once per session for all workers.

    A native distribution is compiled in the folder of its editable installation, so that only new
    files are compiled.
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
                # A release: the metapackage requires versions instead of the folders of this clone.
                command = [
                    sys.executable,
                    "-m",
                    *(FRONT_END if project.native else BACK_END),
                    str(out),
                ]
                done = subprocess.run(
                    command,
                    cwd=project.folder,
                    env={**_with_tools(), "RELEASE": "1"},
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert done.returncode == 0, done.stdout + done.stderr
        (wheel,) = out.iterdir()
        return wheel

    return build


def _with_tools() -> dict[str, str]:
    """Return the environment with this interpreter's tools first in the path, as if activated."""
    scripts = sysconfig.get_path("scripts")
    return {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"}


@frozen
class Environment:
    """A virtual environment with everything that is installed here except our own distributions."""

    python: Path

    def pip(self, *arguments: str) -> str:
        """Run pip in this environment."""
        command = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(self.python),
            "--disable-pip-version-check",
            *arguments,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, *wheels: Path) -> None:
        """Install wheels without their requirements."""
        self.pip("install", "--quiet", "--no-index", "--no-deps", "--no-compile", *map(str, wheels))

    def distributions(self, *, cwd: Path) -> dict[str, str]:
        """Return our distributions that ``arb plugins list`` shows there, with their statuses."""
        listed = json.loads(self.arb("plugins", "list", "--json", cwd=cwd).stdout)
        return {record["distribution"]: record["status"] for record in listed}

    def arb(self, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the installed ``arb`` as a user does, with ``variables`` in the environment."""
        command = [str(self.python.with_name("arb")), *arguments]
        environment = {**_plain_environment(), **variables}
        return subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )

    def run(self, code: str, *, cwd: Path) -> str:
        """Return what a Python program prints there."""
        return self.python_run("-c", code, cwd=cwd)

    def python_run(self, *arguments: str, cwd: Path) -> str:
        """Return what its Python prints with these arguments."""
        command = [str(self.python), *arguments]
        done = subprocess.run(
            command, cwd=cwd, env=_plain_environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def _plain_environment() -> dict[str, str]:
    ours = ("ARB_", "PYTHON", "TRITON_", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


@pytest.fixture(scope="session")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what is installed here, without our own distributions."""
    folder = tmp_path_factory.mktemp("third_party")
    for source in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(source).iterdir():
            ours = "arb_ternary" in entry.name or entry.suffix == ".pth"
            if not ours and entry.name != "__pycache__" and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture
def install(
    clean_environment: Environment,
    projects: Mapping[str, Project],
    wheels: Callable[[Project], Path],
) -> Callable[..., dict[str, Project]]:
    """Return a function that installs a distribution, with extras and what it needs of this
    repository.

    It returns what was installed.
    """

    def install_all(name: str, *extras: str) -> dict[str, Project]:
        needed = closure(projects, name, *extras)
        clean_environment.install(*map(wheels, needed.values()))
        return needed

    return install_all


@pytest.fixture
def clean_environment(tmp_path: Path, third_party: Path) -> Environment:
    """Return a new virtual environment without any of our distributions."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "third_party.pth").write_text(f"{third_party}\n", encoding="utf-8")
    return Environment(folder / "bin" / "python")
