"""The table of what the demo measures, from ``benchmarks/results/demo.json`` into README.md and the documentation.

``--write`` replaces what stands between the markers; without it they are compared, and the exit status is 1 when one
differs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "benchmarks" / "results" / "demo.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "explanation" / "measurements.md")
START, END = "<!-- demo-table -->", "<!-- /demo-table -->"
TITLES = {"demo": "ternary, `sign_votes`", "float32": "float32, AdamW"}


def table(figures: dict[str, Any]) -> str:
    """The figures as a Markdown table, with the machine below it."""
    rows = figures["configs"]
    machine = figures["machine"]
    first, speeds = rows[0], [sorted(row["tokens_per_second"])[len(row["tokens_per_second"]) // 2] for row in rows]
    lines = [
        "| | " + " | ".join(TITLES[row["name"]] for row in rows) + " |",
        "|---|" + "---:|" * len(rows),
        line("parameters", [f"{row['parameters']:,}" for row in rows]),
        line("of these float", [f"{row['float_parameters']:,}" for row in rows]),
        line(
            "validation loss, nats a byte",
            [f"{row['validation_loss_mean']:.3f} ± {row['validation_loss_stdev']:.3f}" for row in rows],
        ),
        line("training state, bytes a parameter", [f"{row['state_bits_per_parameter'] / 8:.2f}" for row in rows]),
        line("training state, bits a parameter", [f"{row['state_bits_per_parameter']:.2f}" for row in rows]),
        line("tokens a second", [f"{speed:,.0f} ({speed / speeds[0]:.2f}x)" for speed in speeds]),
    ]
    notes = (
        f"The same decoder, tokens and order; means and standard deviations of {figures['seeds']} seeds, "
        f"{first['tokens']:,} tokens each. The same validation bytes have a unigram entropy of "
        f"{first['unigram_entropy']:.3f} and a bigram entropy of {first['bigram_entropy']:.3f} nats. State is counted "
        f"from the real tensors: weights, votes, exponents, moments. Speeds are medians of runs that took turns; "
        f"machines differ, ratios less so. Command: `make bench`. Machine: {machine['processor']}, {machine['cores']} "
        f"cores, torch {machine['torch']}."
    )
    return "\n".join([*lines, "", notes])


def line(what: str, cells: list[str]) -> str:
    """One row."""
    return f"| {what} | " + " | ".join(cells) + " |"


def filled(page: str, content: str) -> str:
    """``page`` with ``content`` between the markers."""
    pattern = re.compile(re.escape(START) + ".*?" + re.escape(END), re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"a page has no {START} ... {END}")
    return pattern.sub(lambda _: f"{START}\n\n{content}\n\n{END}", page)


def main() -> int:
    """Compare or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace what differs")
    write = parser.parse_args().write
    content = table(json.loads(FIGURES.read_text(encoding="utf-8")))
    outdated = []
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        wanted = filled(page, content)
        if page != wanted:
            outdated.append(path.name)
            if write:
                path.write_text(wanted, encoding="utf-8")
    if outdated and not write:
        print(f"out of date: {', '.join(outdated)}; rewrite with: make generate", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
