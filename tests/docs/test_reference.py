"""The reference pages, made when the site is built, are complete."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest

from arb_ternary import errors, hookspecs
from arb_ternary.cli.main import arb
from arb_ternary.config.fields import config_fields
from arb_ternary.config.structure import options_class
from arb_ternary.plugins.hooks import specified_in
from arb_ternary.plugins.manager import manager
from arb_ternary_train.config import RunConfig

ROOT = Path(__file__).parents[2]


@functools.cache
def pages() -> dict[str, str]:
    script = ROOT / "docs" / "scripts" / "reference.py"
    made = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(made.stdout)
    return found


def page(name: str) -> str:
    return pages()[name]


def ours(kind: str) -> list[Any]:
    """Return the components of the distributions in this repository."""
    folders = {"arb-ternary-core", *(folder.name for folder in ROOT.glob("*/arb-ternary-*"))}
    return [found for found in manager().registry.all(kind) if found.distribution in folders]


# --- hooks: signatures read from the source, not through the generator


def hook_functions() -> dict[str, ast.FunctionDef]:
    tree = ast.parse(Path(hookspecs.__file__).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


HOOKS = [*specified_in(hookspecs)]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_documented_with_its_exact_signature(hook: str) -> None:
    function = hook_functions()[hook]
    assert function.returns is not None
    wanted = f"{hook}({ast.unparse(function.args)}) -> {ast.unparse(function.returns)}"
    _, _, section = page("hooks.md").partition(f"### `{hook}`\n")
    block = section.split("```")[1].removeprefix("python\n")
    assert "".join(block.split()).replace(",)", ")") == "".join(wanted.split())


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_says_when_it_is_called(hook: str) -> None:
    documentation = ast.get_docstring(hook_functions()[hook]) or ""
    assert "alled" in documentation
    assert documentation.splitlines()[0].replace("``", "`") in page("hooks.md")


# --- what plugins import

_PYTHON = re.compile(r"^```python(?: title=\"[^\"]+\")?\n(.*?)^```$", re.M | re.S)


def imported_by_plugins() -> set[str]:
    """Return the classes and functions that the pages on plugins and the templates import."""
    codes = []
    for path in (ROOT / "docs" / "how-to").glob("write-*.md"):
        codes += _PYTHON.findall(path.read_text(encoding="utf-8"))
    for path in ROOT.glob("plugins/arb-ternary-testing/src/**/*.py.template"):
        codes.append(re.sub(r"\$\{?(\w+)\}?", r"\1", path.read_text(encoding="utf-8")))
    found = set()
    for code in codes:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("arb_ternary"):
                module = import_module(str(node.module))
                names = [alias.name for alias in node.names]
                found |= {name for name in names if callable(getattr(module, name))}
    return found


def test_everything_that_plugins_are_built_from_is_documented() -> None:
    headings = set(re.findall(r"^##+ `(\w+)`$", "\n".join(pages().values()), re.M))
    wanted = {"TernaryOptimizer", "TernaryModule", "TrainingLoop", "TrainingContext", "LoopOptions"}
    assert wanted | imported_by_plugins() <= headings
    blocks = page("building-blocks.md")
    for method in ("apply_votes", "set_votes", "update_of", "train_microbatch", "make_optimizer"):
        assert f"\n{method}(" in blocks
    assert "| `batch_size` |" in blocks


# --- commands, variables, keys, errors


def commands() -> Iterator[tuple[str, click.Command]]:
    yield "arb", arb
    for found in ours("command"):
        yield from walk(f"arb {found.name.replace('.', ' ')}", found.load())


def walk(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    for name, nested in getattr(command, "commands", {}).items():
        yield from walk(f"{path} {name}", nested)


def test_every_command_and_option_is_documented() -> None:
    for path, command in commands():
        group = path.split()[1] if " " in path else "index"
        text = page(f"commands/{group}.md")
        _, heading, section = text.partition(f"## `{path}`\n")
        assert heading, f"{path} is missing"
        section = section.partition("\n## ")[0]
        assert command.help, f"{path} has no help"
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help or parameter.show_default, (
                    f"{path} {parameter.opts[-1]} has no help"
                )
                for option in parameter.opts:
                    assert option in section, f"{path} {option} is missing"


@pytest.mark.parametrize("variable", [variable.name for variable in manager().variables])
def test_an_environment_variable_is_documented(variable: str) -> None:
    assert f"| `{variable}` |" in page("environment.md")


def test_no_other_module_reads_the_environment() -> None:
    allowed = ROOT / "core/src/arb_ternary/environment.py"
    for file in [
        *ROOT.glob("core/src/**/*.py"),
        *ROOT.glob("plugins/*/src/**/*.py"),
        *ROOT.glob("backends/*/src/**/*.py"),
    ]:
        if file == allowed or "testing" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            assert not reads, (
                f"{file}:{node.lineno}: variables are read through arb_ternary.environment"
            )


def test_every_config_key_is_documented_with_its_default() -> None:
    top = page("config/index.md")
    classes: list[tuple[str, str, type[Any]]] = [(top, "## Top level", RunConfig)]
    for kind in manager().registry.kinds:
        if kind in ("backend", "command", "generator", "starter"):
            continue
        components = page(f"config/{kind}.md")
        for found in ours(kind):
            cls = options_class(found.spec)
            assert f"## `{found.name}`" in components, f"{kind} {found.name} is missing"
            if cls is not None:
                classes.append((components, f"## `{found.name}`", cls))
    for chapter, heading, cls in classes:
        section = chapter.partition(f"{heading}\n")[2].partition("\n#")[0]
        for field in config_fields(cls):
            assert f"| `{field.name}` |" in section, f"{heading} {field.name} is missing"
            assert field.metadata["help"], f"{heading} {field.name} has no help"


def test_every_error_is_documented_with_its_exit_code() -> None:
    tree = ast.parse(Path(errors.__file__).read_text(encoding="utf-8"))
    for name in [
        node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)
    ]:
        section = page("errors.md").partition(f"## `{name}`\n")[2]
        found = getattr(errors, name)
        assert section.strip().startswith(
            f"Exit code {found.exit_code}." if isinstance(found, type) else "```python"
        )


# --- models and formats


def test_every_model_has_its_row_of_formats() -> None:
    text = page("formats.md").partition("## Why not")[0]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    head = next(line for line in text.splitlines() if line.startswith("| model |"))
    formats = [name.strip(" `") for name in head.strip("|").split("|")][1:]
    assert set(formats) == {found.name for found in ours("exporter")}
    table = {cells[0]: dict(zip(formats, cells[1:], strict=True)) for cells in lines}
    assert {name.partition("`,")[0].strip("`") for name in table} == {
        found.name for found in ours("model")
    }
    # Each is held by tests of its own: tests/composition/exact and those of interchange.
    for name, cells in table.items():
        assert cells["safetensors"] == "every bit", name
    for architecture in ("llama", "qwen3", "arcee", "bitnet"):
        cells = table[f"`decoder`, `{architecture}`"]
        assert (cells["gguf"], cells["hf"]) == ("weights", "weights")
    assert (table["`vit`"]["gguf"], table["`vit`"]["hf"]) == ("no", "no")
    assert "| `gguf` | a GGUF file holds a decoder, not a Vit |" in page("formats.md")
