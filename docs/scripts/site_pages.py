"""Add the pages to the site that are not files of ``docs``: the reference, the reports and
``CONTRIBUTING.md``.

A hook of mkdocs, see ``mkdocs.yml``. The reference is made by ``reference.py``. Reports are files
of ``benchmarks``. Their links are those of the repository and are rewritten to those of the site.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPORTS = "benchmarks/reports/"
ROOT = Path(__file__).parents[2]
#: A link to a file of the repository that is not on the site.
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:plugins|backends|benchmarks|results)/[^)]*\)")
#: Code of one word that fits on a line of a phone: it is not broken.
SHORT_CODE = re.compile(r"<code>([^<\s]{1,32})</code>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages; called by mkdocs once it has found the files of ``docs``."""
    for path in sorted((ROOT / REPORTS).glob("*.md")):
        files.append(File.generated(config, f"reports/{path.name}", abs_src_path=str(path)))
    contributing = str(ROOT / "CONTRIBUTING.md")
    files.append(File.generated(config, "contributing.md", abs_src_path=contributing))
    # Variables that a person has set must not show in the pages.
    for variable in [name for name in os.environ if name.startswith("ARB_")]:
        del os.environ[variable]
    sys.path.insert(0, str(Path(__file__).parent))
    reference = import_module("reference").pages()
    for name, text in reference.items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    for section in config.nav or []:
        if "Reference" in section:
            section["Reference"] = reference_nav(list(reference))
    return files


def reference_nav(names: list[str]) -> list[Any]:
    """Return the navigation of the reference: pages, and a section per folder."""
    nav: list[Any] = []
    for folder, title in (("config", "Config keys"), ("commands", "Commands")):
        pages = [f"reference/{name}" for name in names if name.startswith(f"{folder}/")]
        nav.append({title: pages})
    return [*nav, *(f"reference/{name}" for name in names if "/" not in name)]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of the repository to those of the site; called by mkdocs for every page.

    Of a link to a file that is not on the site, the text is left.
    """
    if page.file.src_uri == "contributing.md":
        return markdown.replace("](docs/", "](")
    if page.file.src_uri.startswith("reports/"):
        markdown = markdown.replace("](../../docs/", "](../")
    else:
        depth = page.file.src_uri.count("/")
        here = f"]({'../' * (depth + 1)}{REPORTS}"
        markdown = markdown.replace(here, f"]({'../' * depth}reports/")
    return OUTSIDE.sub(r"\1", markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark tables of config keys and short names for the style sheet; called for every page."""
    if page.file.src_uri.startswith("reference/config/"):
        html = html.replace("<table>", '<div class="keys"><table>')
        html = html.replace("</table>", "</table></div>")
    return SHORT_CODE.sub(r'<code class="whole">\1</code>', html)
