"""A package imports only the core and what its pyproject.toml requires, in functions too."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(
    file.parent
    for file in [*ROOT.glob("core/pyproject.toml"), *ROOT.glob("*/arb-ternary-*/pyproject.toml")]
)
INSTALLED = {**packages_distributions(), "tvm": ["tilelang"]}
#: Optional peers: code checks whether they are installed, and measures them if so.
PEERS = {"gemlite", "gguf", "llama_cpp"}

#: Helpers of the tests of several distributions.
SUPPORT = ROOT / "tests/support/arb_test_support"

#: Modules that a test adds to ``sys.modules``.
MADE_BY_TESTS = {
    "arb_config_test_components",
    "arb_run_test_components",
    "arb_study_test_components",
}


def required(project: dict[str, Any], *, tests: bool) -> set[str]:
    """Return the distributions that a project may import: its own, and those that it requires."""
    extras = project.get("optional-dependencies", {})
    texts = [
        *project["dependencies"],
        *(text for name in extras if tests or name != "test" for text in extras[name]),
    ]
    return {project["name"], *(canonicalize_name(Requirement(text).name) for text in texts)}


def imports(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield every module that a folder's files import, dotted, and the importing file."""
    for file in sorted(folder.rglob("*.py")):
        if "templates" in file.parts:
            continue
        yield from imports_of(file)


def imports_of(file: Path) -> Iterator[tuple[Path, str]]:
    """Yield every module that a file imports, itself or through a helper of tests."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((file, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            if (node.module or "").startswith(f"{SUPPORT.name}."):
                yield from imports_of(SUPPORT / f"{str(node.module).partition('.')[2]}.py")
            else:
                yield from ((file, f"{node.module}.{alias.name}") for alias in node.names)


def distribution(module: str) -> str:
    """Return the distribution that a top-level module belongs to."""
    if module == "arb_ternary":
        return "arb-ternary-core"
    if module.startswith("arb_ternary_"):
        return module.replace("_", "-")
    (name, *_) = INSTALLED.get(module, [module])
    return canonicalize_name(name)


@pytest.mark.parametrize("part", ["src", "tests"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_package_imports_the_core_and_what_it_requires(folder: Path, part: str) -> None:
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    allowed = required(project, tests=part == "tests")
    beside = (
        set()
        if part == "src"
        else {path.stem for path in (folder / part).rglob("*.py")} | MADE_BY_TESTS
    )
    strangers = sorted(
        f"{file.relative_to(ROOT)}: {module}"
        for file, module in imports(folder / part)
        if (top := module.partition(".")[0]) not in sys.stdlib_module_names | PEERS | beside
        and distribution(top) not in allowed
    )
    assert strangers == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_package_imports_public_names_of_others(folder: Path) -> None:
    (own,) = [path.name for path in (folder / "src").glob("arb_ternary*") if path.is_dir()]
    for file, module in imports(folder / "src"):
        top, *rest = module.split(".")
        if top.startswith("arb_ternary") and top != own:
            assert not [part for part in rest if re.match(r"_(?!_)", part)], (
                f"{file}: imports {module}, which is private"
            )


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_what_a_package_requires_of_others_it_imports(folder: Path) -> None:
    """A package may also require those of our distributions that its configs name."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    imported = {distribution(module.partition(".")[0]) for _, module in imports(folder / "src")}
    assert {name for name in needed - imported if not name.startswith("arb-ternary")} == set()
