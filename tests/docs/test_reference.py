"""The reference on the site, made when it is built, is complete."""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Callable, Iterator
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
_CELL = re.compile(r"<t[hd][^>]*>(.*?)</t[hd]>", re.S)


@pytest.fixture(scope="module")
def article(site: Path) -> Callable[[str], str]:
    """Return the function that gives the HTML of a page of the reference, without navigation."""

    def read(name: str) -> str:
        text = (site / "reference" / name / "index.html").read_text(encoding="utf-8")
        found = re.search("<article.*?</article>", text, re.S)
        assert found is not None
        return found[0]

    return read


def plain(text: str) -> str:
    """Return the text of HTML, with single spaces."""
    return " ".join(html.unescape(re.sub("<[^>]*>", "", text)).split())


def section(text: str, heading: str) -> str:
    """Return the HTML between the heading with that text and the next heading."""
    parts = re.split(r"<h[1-6][^>]*>(.*?)</h[1-6]>", text, flags=re.S)
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if plain(title).removesuffix("¶").strip() == heading:
            return body
    raise AssertionError(f"{heading} is missing")


def rows(text: str) -> list[list[str]]:
    """Return the cells of every row of the tables in HTML."""
    found = re.findall("<tr>.*?</tr>", text, re.S)
    return [[plain(cell) for cell in _CELL.findall(row)] for row in found]


def ours(kind: str) -> list[Any]:
    """Return the components of the distributions in this repository."""
    folders = {"arb-ternary-core", *(folder.name for folder in ROOT.glob("*/arb-ternary-*"))}
    return [found for found in manager().registry.all(kind) if found.distribution in folders]


HOOKS = [*specified_in(hookspecs)]


def test_every_hook_is_documented_with_its_exact_signature(article: Callable[[str], str]) -> None:
    tree = ast.parse(Path(hookspecs.__file__).read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    text = article("hooks")
    squeezed = "".join(plain(text).split()).replace(",)", ")")
    for hook in HOOKS:
        function = functions[hook]
        assert function.returns is not None
        wanted = f"{hook}({ast.unparse(function.args)})->{ast.unparse(function.returns)}"
        assert f'id="arb_ternary.hookspecs.{hook}"' in text
        assert "".join(wanted.split()) in squeezed
        documentation = ast.get_docstring(function) or ""
        assert "alled" in documentation
        assert plain(documentation.splitlines()[0].replace("``", "")) in plain(text)


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


def test_everything_that_plugins_are_built_from_is_documented(site: Path) -> None:
    anchors = set()
    for page in (site / "reference").rglob("index.html"):
        anchors.update(re.findall(r'id="arb_ternary[\w.]*\.(\w+)"', page.read_text()))
    wanted = {"TernaryOptimizer", "TernaryModule", "TrainingLoop", "TrainingContext", "LoopOptions"}
    wanted |= {"apply_votes", "set_votes", "update_of", "train_microbatch", "make_optimizer"}
    assert wanted | imported_by_plugins() <= anchors


# --- commands, variables, keys, errors


def commands() -> Iterator[tuple[str, click.Command]]:
    yield "arb", arb
    for found in ours("command"):
        yield from walk(f"arb {found.name.replace('.', ' ')}", found.load())


def walk(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    for name, nested in getattr(command, "commands", {}).items():
        yield from walk(f"{path} {name}", nested)


def test_every_command_and_option_is_documented(article: Callable[[str], str]) -> None:
    for path, command in commands():
        page = "/".join(["commands", *path.split()[1:2]])
        options = plain(section(article(page), path))
        assert command.help, f"{path} has no help"
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help or parameter.show_default, (
                    f"{path} {parameter.opts[-1]} has no help"
                )
                for option in parameter.opts:
                    assert option in options, f"{path} {option} is missing"


def test_every_environment_variable_is_documented(article: Callable[[str], str]) -> None:
    listed = {row[0] for row in rows(article("environment"))}
    assert {variable.name for variable in manager().variables} <= listed


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


def test_every_config_key_is_documented_with_its_default(article: Callable[[str], str]) -> None:
    classes: list[tuple[str, str, type[Any]]] = [(article("config"), "Top level", RunConfig)]
    for kind in manager().registry.kinds:
        if kind in ("backend", "command", "generator", "starter"):
            continue
        components = article(f"config/{kind}")
        for found in ours(kind):
            cls = options_class(found.spec)
            assert section(components, found.name)
            if cls is not None:
                classes.append((components, found.name, cls))
    for chapter, heading, cls in classes:
        keys = {row[0]: row for row in rows(section(chapter, heading))}
        for field in config_fields(cls):
            assert field.name in keys, f"{heading} {field.name} is missing"
            assert keys[field.name][2], f"{heading} {field.name} has no default"
            assert field.metadata["help"], f"{heading} {field.name} has no help"


def test_every_error_is_documented_with_its_exit_code(article: Callable[[str], str]) -> None:
    text = article("errors")
    codes = {name: row[0] for row in rows(text) for name in row[1].split(", ")}
    tree = ast.parse(Path(errors.__file__).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            assert f'id="arb_ternary.errors.{node.name}"' in text
        if isinstance(node, ast.ClassDef):
            assert codes[node.name] == str(getattr(errors, node.name).exit_code)


# --- models and formats


def test_every_model_has_its_row_of_formats(article: Callable[[str], str]) -> None:
    lines = rows(article("formats"))
    head = next(row for row in lines if row[0] == "model")
    assert set(head[1:]) == {found.name for found in ours("exporter")}
    table = {row[0]: dict(zip(head, row, strict=True)) for row in lines if len(row) == len(head)}
    del table["model"]
    assert {name.partition(",")[0] for name in table} == {found.name for found in ours("model")}
    # Each is held by tests of its own: tests/composition/exact and those of interchange.
    for name, cells in table.items():
        assert cells["safetensors"] == "every bit", name
    for architecture in ("llama", "qwen3", "arcee", "bitnet"):
        cells = table[f"decoder, {architecture}"]
        assert (cells["gguf"], cells["hf"]) == ("weights", "weights")
    assert (table["vit"]["gguf"], table["vit"]["hf"]) == ("no", "no")
    assert ["gguf", "a GGUF file holds a decoder, not a Vit"] in [row[:2] for row in lines]
