"""Build the distributions into wheels, install them into a clean environment, run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CORE = "arb-ternary-core"
METAPACKAGE = "arb-ternary"
PLUGIN = "arb-ternary-signgsd"
COMPONENT = "signgsd"
BACKEND = "arb-ternary-cpu"
#: The distributions that the metapackage installs.
PARTS = (
    CORE,
    "arb-ternary-interchange",
    "arb-ternary-text",
    "arb-ternary-train",
    "arb-ternary-votes",
)

CONFIG = """\
name: packaged
data: {name: text, path: text.txt}
model: {name: decoder, width: 32, layers: 1, heads: 2, max_length: 32, group_size: 32}
optimizer: OPTIMIZER
phases: [{name: standard, steps: 2, batch_size: 2, block_size: 8, eval_every: 0}]
checks: [pure]
"""


def read_wheel(wheel: Path) -> tuple[set[str], Message, str]:
    """Return the names of the files, METADATA, and the text of entry_points.txt, empty if there is
    none.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        entry_points = [name for name in names if name.endswith(".dist-info/entry_points.txt")]
        text = archive.read(entry_points[0]).decode() if entry_points else ""
        return names, Parser().parsestr(archive.read(metadata).decode()), text


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel without what is compiled."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith((".so", "/RECORD"))]
        return {name: archive.read(name) for name in names}


def write_config(folder: Path, optimizer: str) -> Path:
    (folder / "text.txt").write_text(
        "the quick brown fox jumps over the lazy dog\n" * 40, encoding="utf-8"
    )
    path = folder / "config.yaml"
    path.write_text(CONFIG.replace("OPTIMIZER", optimizer), encoding="utf-8")
    return path


# --- what is in them


def test_wheel_holds_exactly_the_files_of_its_package(
    project: Any, wheels: Callable[..., Path]
) -> None:
    names, _, _ = read_wheel(wheels(project))
    sources = project.folder / "src"
    packaged = {name for name in names if ".dist-info/" not in name}
    folders = (
        []
        if project.name == METAPACKAGE
        else [file.parent for file in sources.glob("*/__init__.py")]
    )
    expected = {
        file.relative_to(sources).as_posix()
        for folder in folders
        for file in folder.rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    expected |= {file.name for file in sources.glob("*.py")}
    if project.native:  # what is compiled is in the wheel, and what it was compiled from is not
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        if sys.version_info >= (3, 12):
            suffix = ".abi3.so"
        expected |= {f"{folder.name}/_native{suffix}" for folder in folders}
    assert packaged == expected


def test_only_native_wheels_are_platform_specific(
    project: Any, wheels: Callable[..., Path]
) -> None:
    *_, platform = wheels(project).stem.split("-")
    assert (platform == "any") == (not project.native)


def test_a_wheel_holds_the_licence(project: Any, wheels: Callable[..., Path]) -> None:
    names, metadata, _ = read_wheel(wheels(project))
    assert [name for name in names if name.endswith("/licenses/LICENSE")]
    assert metadata["License-Expression"] == "Apache-2.0"
    root_licence = (Path(__file__).parents[2] / "LICENSE").read_bytes()
    assert (project.folder / "LICENSE").read_bytes() == root_licence


def test_a_wheel_says_what_it_is_and_which_python_it_needs(
    project: Any, wheels: Callable[..., Path]
) -> None:
    _, metadata, _ = read_wheel(wheels(project))
    assert metadata["Summary"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"Development Status :: 3 - Alpha", "Typing :: Typed"} <= {
        *metadata.get_all("Classifier", [])
    }
    assert metadata.get_payload().strip(), "the README is empty"


def test_a_package_is_typed_and_a_plugin_has_a_hook_module(
    project: Any, wheels: Callable[..., Path]
) -> None:
    if project.name == METAPACKAGE:
        pytest.skip("has no package")
    names, _, entry_points = read_wheel(wheels(project))
    package = "arb_ternary" if project.name == CORE else project.name.replace("-", "_")
    assert f"{package}/py.typed" in names
    hook_module = "arb_ternary.builtin.plugin" if project.name == CORE else f"{package}.plugin"
    assert "[arb_ternary.plugins]" in entry_points
    assert f"= {hook_module}\n" in entry_points + "\n"


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("arb-ternary-text", ["train.txt.xz", "validation.txt.xz"]),
        ("arb-ternary-testing", ["scaffold/templates/"]),
    ],
)
def test_data_files_travel_in_the_wheel(
    name: str, files: list[str], projects: Mapping[str, Any], wheels: Callable[..., Path]
) -> None:
    names, _, _ = read_wheel(wheels(projects[name]))
    for file in files:
        assert [packaged for packaged in names if file in packaged], file


def test_the_core_brings_the_command(
    projects: Mapping[str, Any], wheels: Callable[..., Path]
) -> None:
    _, _, entry_points = read_wheel(wheels(projects[CORE]))
    assert "arb = arb_ternary_program:main" in entry_points


def test_metapackage_requires_its_parts_in_its_own_version(
    projects: Mapping[str, Any], wheels: Callable[..., Path]
) -> None:
    _, metadata, _ = read_wheel(wheels(projects[METAPACKAGE]))
    requirements = [text for text in metadata.get_all("Requires-Dist") if "extra ==" not in text]
    expected = []
    for name in PARTS:
        version = read_wheel(wheels(projects[name]))[1]["Version"]
        assert version == metadata["Version"]
        expected.append(f"{name}=={version}")
    assert sorted(requirements) == sorted(expected)


def test_every_extra_fits_the_distributions_here(
    projects: Mapping[str, Any], wheels: Callable[..., Path]
) -> None:
    extras = projects[METAPACKAGE].metadata["hook"]["optional-dependencies"]
    for name, requirements in extras.items():
        for requirement in map(Requirement, requirements):
            assert requirement.name in projects, f"extra {name!r}"
            version = read_wheel(wheels(projects[requirement.name]))[1]["Version"]
            assert requirement.specifier.contains(version), (
                f"extra {name!r}: {requirement} against {version}"
            )
    needed = {canonicalize_name(Requirement(text).name) for text in extras["all"]}
    assert needed | set(PARTS) == set(projects) - {METAPACKAGE}, "`all` is every plugin and backend"


def test_a_distribution_asks_for_versions_that_are_here(
    project: Any, wheels: Callable[..., Path], projects: Mapping[str, Any]
) -> None:
    extras = project.metadata.get("optional-dependencies", {})
    requirements = {found.name: found for found in project.requirements(*extras)}
    for name in requirements.keys() & projects.keys():
        version = read_wheel(wheels(projects[name]))[1]["Version"]
        assert requirements[name].specifier.contains(version), requirements[name]
        # Until 1.0 a minor version may change any interface.
        assert not requirements[name].specifier.contains("0.2"), requirements[name]
    assert project.name == CORE or CORE in requirements


@pytest.mark.slow
def test_a_source_archive_builds_the_same_wheel(
    project: Any, wheels: Callable[..., Path], tmp_path: Path
) -> None:
    def build(*arguments: str) -> None:
        scripts = sysconfig.get_path("scripts")
        path = f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"
        command = [sys.executable, "-m", "build", "--no-isolation", *arguments]
        subprocess.run(command, env={**os.environ, "PATH": path, "RELEASE": "1"}, check=True)

    build("--sdist", "--outdir", str(tmp_path), str(project.folder))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    build("--wheel", "--outdir", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("*.whl")
    assert contents(wheel) == contents(wheels(project))


# --- installed


def test_core_alone_says_what_brings_training(
    clean_environment: Any, install: Callable[..., Any], tmp_path: Path
) -> None:
    assert set(install(CORE)) == {CORE}
    assert clean_environment.distributions(cwd=tmp_path) == {CORE: "loaded"}
    place = clean_environment.run("import arb_ternary; print(arb_ternary.__file__)", cwd=tmp_path)
    assert place.startswith(str(tmp_path)), "the editable installation was imported"
    refused = clean_environment.arb(
        "train", str(write_config(tmp_path, "sign_votes")), cwd=tmp_path
    )
    assert refused.returncode == 2
    assert "pip install arb-ternary brings" in refused.stderr
    assert "Traceback" not in refused.stderr
    code = "try:\n    from arb_ternary import audit\nexcept ImportError as error:\n    print(error)"
    said = clean_environment.run(code, cwd=tmp_path)
    assert said == "arb_ternary.audit is not installed: pip install arb-ternary-train\n"


#: Installed one by one in every test run: parts only, the core alone, and a native one. The
#: others, which differ only in what they hold, are installed by `make test-alone`.
INSTALLED = (METAPACKAGE, CORE, BACKEND)


@pytest.mark.parametrize("name", INSTALLED)
def test_distribution_installs_and_lists_itself(
    name: str,
    projects: Mapping[str, Any],
    clean_environment: Any,
    install: Callable[..., Any],
    tmp_path: Path,
) -> None:
    installs_and_lists_itself(projects[name], clean_environment, install, tmp_path)


@pytest.mark.slow
def test_every_distribution_installs_and_lists_itself(
    project: Any, clean_environment: Any, install: Callable[..., Any], tmp_path: Path
) -> None:
    installs_and_lists_itself(project, clean_environment, install, tmp_path)


def installs_and_lists_itself(
    project: Any, clean_environment: Any, install: Callable[..., Any], tmp_path: Path
) -> None:
    expected = dict.fromkeys(set(install(project.name)) - {METAPACKAGE}, "loaded")
    clean_environment.pip("check")
    assert clean_environment.distributions(cwd=tmp_path) == expected
    if project.name != METAPACKAGE:
        package = "arb_ternary" if project.name == CORE else project.name.replace("-", "_")
        place = clean_environment.run(f"import {package}; print({package}.__file__)", cwd=tmp_path)
        assert place.startswith(str(tmp_path)), "the editable installation was imported"


def test_pip_install_of_a_clone_gives_a_program_that_trains(
    clean_environment: Any, tmp_path: Path
) -> None:
    root = Path(__file__).parents[2]
    clean_environment.pip(
        "install", "--quiet", "--no-index", "--no-build-isolation", "--no-compile", str(root)
    )
    assert clean_environment.distributions(cwd=tmp_path) == dict.fromkeys(PARTS, "loaded")
    config = write_config(tmp_path, "scaled_votes")
    trained = clean_environment.arb("train", str(config), "--run-dir", "run", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))


def test_removed_plugin_is_an_error_with_the_install_line(
    clean_environment: Any, install: Callable[..., Any], tmp_path: Path
) -> None:
    install(METAPACKAGE)
    install(PLUGIN)
    config = write_config(tmp_path, COMPONENT)
    assert clean_environment.distributions(cwd=tmp_path)[PLUGIN] == "loaded"
    assert clean_environment.arb("config", "validate", str(config), cwd=tmp_path).returncode == 0

    clean_environment.pip("uninstall", "--yes", "--quiet", PLUGIN)

    for command in (
        ["config", "validate", str(config)],
        ["train", str(config), "--run-dir", "run"],
    ):
        refused = clean_environment.arb(*command, cwd=tmp_path)
        assert refused.returncode == 3
        assert f"pip install {PLUGIN}" in refused.stderr
        assert "Traceback" not in refused.stderr
    assert not (tmp_path / "run").exists()


def test_a_native_backend_that_is_installed_trains_by_default(
    clean_environment: Any, install: Callable[..., Any], tmp_path: Path
) -> None:
    install(METAPACKAGE)
    install(BACKEND)
    config = write_config(tmp_path, "sign_votes")
    trained = clean_environment.arb("train", str(config), "--run-dir", "run", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert record["backend"] == {"name": "cpu", "source": "default"}
    place = clean_environment.run(
        "import arb_ternary_cpu._native as n; print(n.__file__)", cwd=tmp_path
    )
    assert place.startswith(str(tmp_path)), "the editable installation was imported"


def test_what_is_released_trains_exports_generates_and_goes(
    clean_environment: Any,
    install: Callable[..., Any],
    projects: Mapping[str, Any],
    tmp_path: Path,
) -> None:
    install(METAPACKAGE)
    install(BACKEND)
    config = write_config(tmp_path, "scaled_votes")
    for arguments in (
        ("train", str(config), "--run-dir", "run", "-o", "model.architecture=qwen3"),
        ("export", "run", "model.gguf", "--format", "gguf"),
        ("generate", "model.gguf", "--prompt", "the", "--max-new-tokens", "4"),
    ):
        done = clean_environment.arb(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the")

    clean_environment.pip("uninstall", "--yes", "--quiet", *projects)

    place = clean_environment.python.parents[1]
    assert [file for file in place.rglob("*") if "arb" in file.name] == []


@pytest.mark.parametrize("name", ["tilelang", pytest.param("triton", marks=pytest.mark.slow)])
def test_a_backend_that_is_not_installed_is_missed_by_its_name(
    name: str, clean_environment: Any, install: Callable[..., Any], tmp_path: Path
) -> None:
    install(METAPACKAGE)
    refused = clean_environment.arb("backends", "explain", "--backend", name, cwd=tmp_path)
    assert refused.returncode == 3
    assert f"pip install arb-ternary-{name}" in refused.stderr


@pytest.mark.slow
def test_the_tilelang_backend_works_on_the_core_alone(
    clean_environment: Any, install: Callable[..., Any], tmp_path: Path
) -> None:
    install("arb-ternary-tilelang")
    explained = clean_environment.arb("backends", "explain", "--backend", "tilelang", cwd=tmp_path)
    assert explained.returncode == 0, explained.stderr
    place = clean_environment.run(
        "import arb_ternary_tilelang.backend as b; print(b.__file__)", cwd=tmp_path
    )
    assert place.startswith(str(tmp_path)), "the editable installation was imported"


def test_triton_backend_works_on_the_core_alone(
    clean_environment: Any, install: Callable[..., Any], tmp_path: Path
) -> None:
    install("arb-ternary-triton")
    arguments = ("backends", "explain", "--backend", "triton", "--json")
    refused = clean_environment.arb(*arguments, cwd=tmp_path)
    assert refused.returncode == 3
    assert "TRITON_INTERPRET=1 runs its interpreter" in refused.stderr
    assert "Traceback" not in refused.stderr
    served = clean_environment.arb(*arguments, cwd=tmp_path, TRITON_INTERPRET="1")
    assert json.loads(served.stdout)["backend"] == "triton", served.stderr
