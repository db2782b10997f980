"""The examples in the documentation work as they stand.

A code block with a title is a file. The files of a page are written into a folder; a
``pyproject.toml`` among them makes the folder an installed distribution. Then everything that can
be run is run there: tests, Python blocks behind a ``<!-- run -->`` line, in their order, and every
YAML block is checked as a config: whole where it has a title, as a change to a small config where
it has none.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import yaml
from attrs import frozen

from arb_ternary.cli.main import arb
from arb_ternary.plugins.manager import manager
from arb_ternary_testing import install_fake_plugin
from arb_ternary_train.cli.generate import Handover

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "reports" / "quality.md",
]
FENCE = re.compile(
    r"(?P<run><!-- run -->\n)?^```(?P<language>\w*)(?: "
    r"title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.M | re.S,
)
Python = Callable[..., str]
BASE = {
    "data": "shakespeare",
    "model": "decoder",
    "optimizer": "sign_votes",
    "phases": ["standard"],
}


@frozen
class Block:
    """A code block of a page."""

    language: str
    title: str
    run: bool
    text: str


def blocks(path: Path) -> list[Block]:
    return [
        Block(found["language"], found["title"] or "", bool(found["run"]), found["text"])
        for found in FENCE.finditer(path.read_text(encoding="utf-8"))
    ]


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lay_out(path: Path, folder: Path) -> list[Block]:
    """Write the files of a page; returns its blocks."""
    found = blocks(path)
    files = {block.title: block.text for block in found if block.title}
    if "pyproject.toml" in files:
        project = tomllib.loads(files["pyproject.toml"])["project"]
        entry_points = project["entry-points"]["arb_ternary.plugins"]
        install_fake_plugin(
            folder,
            project["name"],
            files,
            entry_points=entry_points,
            version=project.get("version", "1.0"),
        )
    else:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    return found


@pytest.mark.parametrize("path", [p for p in PAGES if any(b.run for b in blocks(p))], ids=page_id)
def test_the_python_of_a_page_runs(path: Path, tmp_path: Path, python: Python) -> None:
    code = "\n".join(block.text for block in lay_out(path, tmp_path) if block.run)
    python(tmp_path, "-W", "error", "-c", code)


@pytest.mark.parametrize(
    "path", [p for p in PAGES if any("test_" in b.title for b in blocks(p))], ids=page_id
)
def test_the_tests_of_a_page_pass(path: Path, tmp_path: Path, python: Python) -> None:
    tests = [
        block.title
        for block in lay_out(path, tmp_path)
        if Path(block.title).name.startswith("test_")
    ]
    python(
        tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *tests
    )


def plugin_files() -> list[tuple[Path, str]]:
    """Return page and name of every plugin that is a single file."""
    found = []
    for path in PAGES:
        for block in blocks(path):
            is_file = block.title.endswith(".py") and "/" not in block.title
            if is_file and re.search(r"^@hookimpl\ndef arb_register", block.text, re.M):
                found.append((path, block.title))
    return found


@pytest.mark.parametrize(("path", "name"), plugin_files(), ids=lambda value: Path(value).name)
def test_single_file_plugin_passes_the_conformance_kit(
    path: Path, name: str, tmp_path: Path, python: Python
) -> None:
    lay_out(path, tmp_path)
    output = python(tmp_path, "-m", "arb_ternary.cli.main", "plugins", "check", name)
    assert output.rstrip().endswith("all passed")


@pytest.mark.parametrize(
    "path", [p for p in PAGES if any(b.language == "yaml" for b in blocks(p))], ids=page_id
)
def test_the_configs_of_a_page_are_valid(path: Path, tmp_path: Path, python: Python) -> None:
    names = []
    for index, block in enumerate(lay_out(path, tmp_path)):
        if block.language != "yaml":
            continue
        name = block.title
        if not name:
            name = f"fragment-{index}.yaml"
            (tmp_path / name).write_text(
                yaml.safe_dump({**BASE, **yaml.safe_load(block.text)}), encoding="utf-8"
            )
        names.append(name)
    # One process for all of them, but each with its own plugins: a plugin file is loaded by the
    # config that names it.
    code = (
        "import sys\n"
        "from arb_ternary.cli.main import main\n"
        "from arb_ternary.plugins.manager import reset_manager\n"
        "for name in sys.argv[1:]:\n"
        "    manifest = 'targets:' in open(name, encoding='utf-8').read()\n"
        "    status = main(['config', 'validate', name, '--document', 'manifest' if manifest else "
        "'run'])\n"
        "    assert status == 0, (name, status)\n"
        "    reset_manager()\n"
    )
    python(tmp_path, "-c", code, *names)


def command_lines() -> list[tuple[str, str]]:
    """Every line of a shell block, and every code span, that begins with ``arb``."""
    found = []
    for path in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = path.read_text(encoding="utf-8")
        shell = "\n".join(block.text for block in blocks(path) if block.language in ("", "console"))
        lines = re.findall(r"^(?:[A-Z_]+=\S+ )*(arb .*)$", shell, flags=re.M)
        lines += re.findall(r"`(arb [^`\n]+)`", FENCE.sub("", text))
        found += [(page_id(path), line) for line in lines]
    return found


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_a_command_line_in_the_documentation_exists(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    command: click.Command = arb
    while words:
        if isinstance(command, click.Group):
            while words and words[0] == "--plugin":
                words = words[2:]
            if words and words[0].startswith("-"):
                break
            if not words or words[0].isupper() or words[0].startswith("{"):
                return
            name = words.pop(0)
            nested = command.get_command(click.Context(command), name)
            assert nested is not None, f"{page}: {line}: there is no {name}"
            command = nested
        else:
            break
    taking = [command]
    if isinstance(command, Handover):  # its other options are those of the generator for the run
        taking += [found.load() for found in manager().registry.all("generator")]
    parameters = [parameter for each in taking for parameter in each.params]
    options = {
        option
        for parameter in parameters
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    used = {word.partition("=")[0] for word in words if word.startswith("-")} - {"--help", "-h"}
    assert used <= options, f"{page}: {line}"
