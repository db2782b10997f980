"""Add the lab notebooks of the bench plugin to the site, below ``reports/``.

A hook of mkdocs, see ``mkdocs.yml``. The notebooks are files outside of ``docs``. Links between
them and the pages are those of the repository, and are rewritten to those of the site.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FOLDER = "plugins/arb-ternary-bench/reports/"
ROOT = Path(__file__).parents[2]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every notebook; called by mkdocs once it has found the files of ``docs``."""
    for path in sorted((ROOT / FOLDER).glob("*.md")):
        files.append(File.generated(config, f"reports/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page that cross the border; called by mkdocs for every page."""
    if page.file.src_uri.startswith("reports/"):
        return markdown.replace("](../../../docs/", "](../")
    depth = page.file.src_uri.count("/")
    return markdown.replace(f"]({'../' * (depth + 1)}{FOLDER}", f"]({'../' * depth}reports/")
