"""Links, commands and lists in the documentation are correct."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OUTSIDE = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("*/README.md")),
    *sorted(ROOT.glob("*/arb-ternary-*/README.md")),
    *sorted((ROOT / "benchmarks" / "reports").glob("*.md")),
]
PAGES = [*OUTSIDE, *sorted((ROOT / "docs").rglob("*.md"))]


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_site_builds_without_a_warning(site: Path) -> None:
    assert (site / "reference" / "hooks" / "index.html").is_file()
    assert (site / "reports" / "what-rules-learn" / "index.html").is_file()
    assert not (site / "scripts").exists()


def links_of(page: Path) -> set[Path]:
    """Return the pages that the text of a page links to, without the navigation around it."""
    article = re.search("<article.*?</article>", page.read_text(encoding="utf-8"), re.S)
    assert article is not None
    targets = re.findall('href="([^"#?]+)', article[0])
    found = {(page.parent / target).resolve() for target in targets if "://" not in target}
    return {target / "index.html" for target in found if target.is_dir()}


def test_a_stranger_finds_the_way_in_two_clicks(site: Path) -> None:
    first = links_of(site / "index.html")
    within = first.union(*map(links_of, first))
    # What a stranger looks for, with words of the page that answers.
    wanted = {
        "tutorial/first-run": ("pip install .", "arb train first.yaml"),
        "how-to/fine-tune": ("arb finetune",),
        "tutorial/conversations": ("arb chat",),
        "how-to/serve": ("arb serve",),
        "how-to/write-an-optimizer-plugin": ("arb plugins new",),
    }
    for name, words in wanted.items():
        page = site / name / "index.html"
        assert page in within, f"{name} is further than two clicks from the front page"
        text = re.sub("<[^>]*>", "", page.read_text(encoding="utf-8"))
        assert all(word in text for word in words), name


@pytest.mark.parametrize("path", OUTSIDE, ids=page_id)
def test_links_of_pages_outside_the_site_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target.partition("#")[0]).exists(), f"{target} does not exist"


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z]+):", text, flags=re.MULTILINE))


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_the_make_targets_that_a_page_names_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = {
        one or other
        for one, other in re.findall(r"`make ([a-z]+)`|^make ([a-z]+)$", text, flags=re.MULTILINE)
    }
    assert named <= make_targets()


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "\nmake test\n" in script
    assert "\nmake test\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_list_of_distributions_is_complete() -> None:
    listed = (
        (ROOT / "README.md")
        .read_text(encoding="utf-8")
        .partition("## Packages")[2]
        .partition("\n## ")[0]
    )
    files = [
        ROOT / "pyproject.toml",
        ROOT / "core" / "pyproject.toml",
        *ROOT.glob("*/arb-ternary-*/pyproject.toml"),
    ]
    for file in files:
        name = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["name"]
        assert f"`{name}`" in listed


def test_every_distribution_is_in_the_development_requirements() -> None:
    text = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines[0].startswith("torch=="), "torch is pinned, and first"
    folders = [file.parent for file in ROOT.glob("*/arb-ternary-*/pyproject.toml")]
    editable = {
        line.removeprefix("-e ").partition("[")[0] for line in lines if line.startswith("-e ")
    }
    assert editable == {"core", *(folder.relative_to(ROOT).as_posix() for folder in folders)}


def words(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").split())


def test_pages_stay_within_their_budgets() -> None:
    assert words(ROOT / "README.md") <= 900
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 80
    written = (ROOT / "docs").rglob("*.md")
    assert sum(words(path) for path in written) <= 45_000
