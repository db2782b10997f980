"""What a plugin is loaded from, and what `arb --help` needs, imports nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "triton", "tilelang", "numpy", "yaml", "cattrs", "rich", "matplotlib", "safetensors")
LIGHT = (
    "arb_ternary",
    "arb_ternary.specs",
    "arb_ternary.errors",
    "arb_ternary.hookspecs",
    "arb_ternary.environment",
    "arb_ternary.plugins.manager",
    "arb_ternary.plugins.observers",
    "arb_ternary.cli",
    "arb_ternary.cli.main",
)
PLUGINS = sorted([*ROOT.glob("plugins/*/src/*"), *ROOT.glob("backends/*/src/*")])
PACKAGES = [folder.name for folder in PLUGINS if (folder / "plugin.py").is_file()]


@pytest.mark.parametrize("module", [*LIGHT, "arb_ternary.builtin.plugin", *(f"{name}.plugin" for name in PACKAGES)])
def test_a_light_module_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_no_config_module_imports_torch() -> None:
    names = sorted(file.stem for file in (ROOT / "core/src/arb_ternary/config").glob("*.py") if file.stem != "__init__")
    modules = ", ".join(f"arb_ternary.config.{name}" for name in names)
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr


def _imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@pytest.mark.parametrize("package", PLUGINS, ids=lambda folder: folder.name)
def test_a_plugin_imports_public_names_of_the_core_and_no_other_plugin(package: Path) -> None:
    for file in package.rglob("*.py"):
        for name in _imports(file):
            top, *rest = name.split(".")
            if top.startswith("arb_ternary_"):
                assert top == package.name, f"{file}: imports the plugin {top}"
            if top == "arb_ternary":
                private = [part for part in rest if part.startswith("_") and not part.endswith("__")]
                assert not private, f"{file}: imports {name}, which is private"
                assert rest[:1] not in (["builtin"], ["scaffold"]), f"{file}: imports {name}"
