"""Hook modules and `arb --help` import nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torch",
    "triton",
    "tilelang",
    "numpy",
    "yaml",
    "cattrs",
    "rich",
    "matplotlib",
    "safetensors",
)
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


@pytest.mark.parametrize(
    "module", [*LIGHT, "arb_ternary.builtin.plugin", *(f"{name}.plugin" for name in PACKAGES)]
)
def test_a_light_module_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_no_config_module_imports_torch() -> None:
    names = sorted(
        file.stem
        for file in (ROOT / "core/src/arb_ternary/config").glob("*.py")
        if file.stem != "__init__"
    )
    modules = ", ".join(f"arb_ternary.config.{name}" for name in names)
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr


#: The start of a program that cannot import torch.
NO_TORCH = "import sys; sys.modules['torch'] = None"


def without_torch(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"{NO_TORCH}\n{code}", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_options_of_every_component_are_known_without_torch() -> None:
    code = (
        "from arb_ternary.plugins.manager import manager\n"
        "from arb_ternary.specs import resolve\n"
        "for found in manager().registry.everything():\n"
        "    print(found.spec.kind, found.spec.name, found.spec.config and "
        "resolve(found.spec.config))\n"
    )
    done = without_torch(code)
    assert done.returncode == 0, done.stderr
    assert "phase standard <class" in done.stdout


GROWN = """
data: shakespeare
masking: {name: time_step, num_time_steps: 8}
model: {name: decoder, width: 32, layers: 1, heads: 2, max_length: 128, float_parts: [head]}
optimizer: {name: gqc.gnts, inner: {name: split, ternary: sign_votes}}
phases: [{name: progressive, target_stacks: 3, block_size: 128}]
"""


@pytest.mark.parametrize(
    "text", [(ROOT / "docs/examples/demo.yaml").read_text(), GROWN], ids=["demo", "grown"]
)
def test_a_config_is_validated_without_torch(text: str, tmp_path: Path) -> None:
    arb = "from arb_ternary.cli.main import main; sys.exit(main())"
    path = tmp_path / "run.yaml"
    path.write_text(text)
    done = without_torch(arb, "config", "validate", str(path))
    assert done.returncode == 0, done.stderr

    path.write_text(text.replace("max_length: 128", "max_length: 64"))
    done = without_torch(arb, "config", "validate", str(path))
    assert done.returncode == 2, done.stderr
    assert (
        "phases[0].block_size: 128 exceeds the context of the model: max_length is 64"
        in done.stderr
    )


def test_training_a_pure_model_does_not_import_the_compiler(tmp_path: Path) -> None:
    # torch's optimizers import it to step, which takes longer than a short run.
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    (tmp_path / "config.yaml").write_text(
        f"data: {{name: text, path: {tmp_path}/text.txt}}\n"
        "model: {name: decoder, width: 32, layers: 1, heads: 2, max_length: 8, group_size: 32}\n"
        "optimizer: scaled_votes\n"
        "phases: [{name: standard, steps: 2, batch_size: 2, block_size: 8}]\n"
    )
    code = (
        "import sys; from arb_ternary.cli.main import main\n"
        "try: main()\n"
        "finally: print('torch._dynamo' in sys.modules)\n"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "train",
        str(tmp_path / "config.yaml"),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (tmp_path / "run" / "result.json").exists(), done.stderr
    assert done.stdout.split()[-1] == "False"
