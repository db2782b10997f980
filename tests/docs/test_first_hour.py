"""The shell blocks of the README and of the first tutorial run, line by line, with fewer steps.

Each line of `arb` is a process of its own, in an empty folder and with an empty home. `make demo`
stands for the commands of its recipe. Lines that install are not run; what they name must exist.
The block of the README that is marked `sh` tells the story of `conversations.md`, which runs here.
"""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Pages, and commands that they have to show.
PAGES = {
    "README.md": {"config", "train", "generate"},
    "docs/tutorial/first-run.md": {"config", "train", "generate"},
    "docs/tutorial/conversations.md": {"data", "train", "chat", "finetune", "export", "generate"},
}
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"^```\w+ title=\"([^\"]+)\"\n(.*?)^```$", re.M | re.S)
#: What makes a command short, by its first words.
SHORT = {
    "train": "-o phases.0.steps=2 -o phases.0.batch_size=1 -o phases.0.eval_every=0 -o checks=[]",
    "generate": "--max-new-tokens 4",
    "eval": "--batches 1",
    "finetune": "-o phases.0.steps=2",
    "upcycle": "--blockwise-steps 0 --steps 0 --block-size 32 "
    "-o phases.0.max_nll=100 -o phases.2.calibration_tokens=256 -o checks=[]",
}
RUN = """
import os, sys
os.environ["HOME"] = sys.argv[1]
sys.stdin = open(os.devnull)
from arb_ternary.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
Python = Callable[..., str]


def lines_of(text: str) -> Iterator[list[str]]:
    """Yield the words of each line of the shell blocks; `make demo` is its recipe."""
    for kind, block in BLOCK.findall(text):
        if kind not in ("", "console"):
            continue
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] == ["make", "demo"]:
                yield from demo_recipe()
            elif words:
                yield words


def demo_recipe() -> Iterator[list[str]]:
    """Yield the commands of `arb` in the recipe of the target `demo`."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    run = re.search(r"^RUN := (\S+)$", makefile, re.M)
    recipe = re.search(r"^demo: .*\n((?:\t.*\n)+)", makefile, re.M)
    assert run is not None
    assert recipe is not None
    found = re.findall(r"^\t\$\(BIN\)/(arb .*)$", recipe[1], re.M)
    assert found, "the recipe has no command"
    for line in found:
        yield shlex.split(line.replace("$(RUN)", run[1]))


def check_installs(words: list[str]) -> None:
    """Check what a `pip install` names: the pinned torch, or the metapackage here."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    known = extras["tool"]["hatch"]["metadata"]["hooks"]["custom"]["optional-dependencies"]
    pinned = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").split()
    for name in words[2:]:
        found = re.fullmatch(r"\.(?:\[([\w,]+)\])?", name)
        assert found or (name.startswith("torch==") and name in pinned), name
        if found and found[1]:
            assert set(found[1].split(",")) <= set(known), name


@pytest.mark.parametrize("name", PAGES)
def test_the_shell_blocks_of_a_page_run(name: str, tmp_path: Path, python: Python) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    home = tmp_path / "home"
    folder = tmp_path / "clone"
    home.mkdir()
    (folder / "docs").mkdir(parents=True)
    shutil.copytree(ROOT / "docs" / "examples", folder / "docs" / "examples")
    files = dict(FILE.findall(page))
    made = {words[3] for words in lines_of(page) if words[1:3] == ["config", "new"]}
    for given in files.keys() - made:
        (folder / given).write_text(files[given], encoding="utf-8")
    done = []
    for words in lines_of(page):
        match words[0]:
            case "arb":
                pass
            case "pip":
                check_installs(words)
                continue
            case "python":
                python(folder, words[1])
                continue
            case "make" | "git" | "python3" | ".":
                continue  # `make test`, `make docs`: their targets are checked in test_site.py
            case other:
                pytest.fail(f"{name}: {other}: say here how it is checked")
        if words[1] == "upcycle":
            shutil.copyfile(folder / "demo.gguf", folder / words[2])
        short = SHORT.get(words[1], "").split()
        python(folder, "-c", RUN, str(home), *words[1:], *short)
        if words[1:3] == ["config", "new"] and words[3] in files:
            (folder / words[3]).write_text(files[words[3]], encoding="utf-8")
        done.append(words[1])
    assert PAGES[name] <= set(done)
