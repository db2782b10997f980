"""What a plugin is loaded from, and what `arb --help` needs, imports nothing heavy."""

from __future__ import annotations

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
