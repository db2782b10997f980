"""Write tables of measured results, and one of code, into README.md, the pages and the reports.

``--write`` replaces what is between the markers. Without it they are compared, and the exit status
is 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arb_ternary.config.fields import to_plain
from arb_ternary_orchestrator.built_in import STRATEGIES
from arb_ternary_orchestrator.strategies import find_strategy
from arb_ternary_testing.component import make_choice

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import generation
import quality
import reasoning
import serving
from harness.table import ResultTable
from kernel_tables import back_table, product_table, update_table

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
README = ROOT / "README.md"
REPORTS = BENCHMARKS / "reports"
DEMO = REPORTS / "demo.md"
QUALITY = REPORTS / "what-rules-learn.md"
KERNELS = REPORTS / "cpu-kernels.md"
WHOLE = REPORTS / "whole-models.md"
LANGUAGE = REPORTS / "language.md"
ORCHESTRATE = ROOT / "docs" / "how-to" / "orchestrate.md"
TITLES = {
    "demo": "ternary, `scaled_votes`",
    "plain": "ternary, without gains and factors",
    "vectors": "ternary matrices, float vectors",
    "float-ends": "ternary; embedding and head float",
    "bitnet": "QAT, AdamW",
    "float32": "float32, AdamW",
}


def demo_table(figures: dict[str, Any]) -> str:
    """Return the demo's table, with the machine below it."""
    rows = figures["configs"]
    machine = figures["machine"]
    first = rows[0]
    speeds = [sorted(row["tokens_per_second"])[len(row["tokens_per_second"]) // 2] for row in rows]
    lines = [
        "| | " + " | ".join(TITLES[row["name"]] for row in rows) + " |",
        "|---|" + "---:|" * len(rows),
        line("parameters", [f"{row['parameters']:,}" for row in rows]),
        line("of these float", [f"{row['float_parameters']:,}" for row in rows]),
        line(
            "validation loss, nats per byte",
            [
                f"{row['validation_loss_mean']:.3f} ± {row['validation_loss_stdev']:.3f}"
                for row in rows
            ],
        ),
        line(
            "training state, bytes per parameter",
            [f"{row['state_bits_per_parameter'] / 8:.2f}" for row in rows],
        ),
        line(
            "training state, bits per parameter",
            [f"{row['state_bits_per_parameter']:.2f}" for row in rows],
        ),
        line("tokens a second", [f"{speed:,.0f} ({speed / speeds[0]:.2f}x)" for speed in speeds]),
    ]
    notes = (
        f"The same decoder, tokens and order; means and standard deviations of {figures['seeds']} "
        f"seeds, {first['tokens']:,} tokens each. The same validation bytes have a unigram entropy "
        f"of {first['unigram_entropy']:.3f} and a bigram entropy of {first['bigram_entropy']:.3f} "
        "nats. State is counted from the real tensors: weights, votes, exponents, moments. Speeds "
        "are medians of runs that took turns; machines differ, ratios less so. Command: `make "
        f"bench`. Machine: {machine['processor']}, {machine['cores']} cores, torch "
        f"{machine['torch']}."
    )
    if "note" in figures:  # of results that are older than what they are about
        notes += f" {figures['note']}"
    return "\n".join([*lines, "", notes])


#: Rows of the README's table: the config, and what the table calls it.
README_ROWS = {
    "float32": "float32, AdamW",
    "demo": "**ARB Ternary, no float parameter**",
    "bitnet": "quantisation-aware training (BitNet b1.58), AdamW",
}


def readme_table(figures: dict[str, Any]) -> str:
    """Return the README's table: loss and training state of three of the demo's configs."""
    rows = {row["name"]: row for row in figures["configs"]}
    tokens = figures["configs"][0]["tokens"] / 1e6
    machine = figures["machine"]
    lines = [
        f"| decoder of 0.6 M parameters, {tokens:.1f} M tokens, {figures['seeds']} seeds "
        "| validation loss (nats per byte) | training state (bits per parameter) |",
        "|---|---:|---:|",
    ]
    for name, title in README_ROWS.items():
        row = rows[name]
        loss = f"{row['validation_loss_mean']:.3f} ± {row['validation_loss_stdev']:.3f}"
        bits = f"{row['state_bits_per_parameter']:.2f}"
        if title.startswith("**"):
            loss = f"**{loss}**"
            bits = f"**{bits}**"
        lines.append(line(title, [loss, bits]))
    lines += [
        "",
        f"Text: Shakespeare. Command: `make bench`. Machine: {machine['processor']}, "
        f"{machine['cores']} cores, torch {machine['torch']}.",
    ]
    return "\n".join(lines)


def line(what: str, cells: list[str]) -> str:
    """Return one row."""
    return f"| {what} | " + " | ".join(cells) + " |"


def strategies_table() -> str:
    """Return the built-in strategies, and what they do to votes and to AdamW."""
    votes = make_choice("optimizer", "scaled_votes")
    floats = make_choice("optimizer", "adamw")
    lines = ["| strategy | what it is for | votes | float parameters |", "|---|---|---|---|"]
    for name, summary in STRATEGIES.items():
        strategy = find_strategy(name)
        rates = strategy.adjustment(floats)
        clip = {"configured": [], None: ["no clipping"]}.get(
            rates.grad_clip, [f"clipped to {rates.grad_clip}"]
        )
        cells = [
            [factor(rates.ternary_rate), *changes(votes, strategy.optimizer(votes))],
            [factor(rates.float_rate), *changes(floats, strategy.optimizer(floats)), *clip],
        ]
        shown = [", ".join(filter(None, cell)) or "as configured" for cell in cells]
        lines.append(f"| `{name}` | {summary} | {' | '.join(shown)} |")
    return "\n".join(lines)


def table(of: ResultTable) -> Callable[[dict[str, Any]], str]:
    """Return what makes a table of a result in Markdown, with its notes."""
    return lambda result: of.markdown(result).strip()


def factor(rate: float) -> str:
    """Return a factor on a rate; empty for one."""
    return "" if rate == 1.0 else f"rate x {rate:g}"


def changes(before: Any, after: Any) -> list[str]:
    """Return what distinguishes an optimizer from another: its name, or its options."""
    old = to_plain(before.options)
    if after.name != before.name:
        inner = getattr(after.options, "inner", None)
        inside = [] if inner is None else changes(before, inner)
        own = [
            f"`{key}` {getattr(after.options, key):g}"
            for key in sorted(after.given - {"inner", "lr", "weight_decay"})
        ]
        return [f"`{after.name}`", *own, *inside]
    return [
        f"`{key}` {json.dumps(value)}"
        for key, value in to_plain(after.options).items()
        if value != old[key]
    ]


#: Marker, file of results, what makes a table of it, pages.
TABLES = (
    ("readme-table", "demo.json", readme_table, (README,)),
    ("demo-table", "demo.json", demo_table, (DEMO,)),
    ("quality-small", "quality-small.json", table(quality.TABLE), (QUALITY,)),
    ("quality-orthogonal", "quality-orthogonal.json", table(quality.TABLE), (QUALITY,)),
    ("quality-survey", "quality-survey.json", table(quality.TABLE), (QUALITY,)),
    ("quality-medium", "quality-medium.json", table(quality.TABLE), (QUALITY,)),
    ("cpu-linear", "cpu-kernels.json", product_table, (KERNELS,)),
    ("cpu-back", "cpu-kernels.json", back_table, (KERNELS,)),
    ("cpu-update", "cpu-kernels.json", update_table, (KERNELS,)),
    ("whole-generate", "generate.json", table(generation.TABLE), (WHOLE,)),
    ("whole-generate-7b", "generate-7b.json", table(generation.TABLE), (WHOLE,)),
    ("reasoning", "reasoning.json", table(reasoning.TABLE), (LANGUAGE,)),
    ("serving", "serving.json", table(serving.TABLE), (LANGUAGE,)),
    ("cpu-linear-amx", "cpu-kernels-amx.json", product_table, (KERNELS,)),
    ("cpu-back-amx", "cpu-kernels-amx.json", back_table, (KERNELS,)),
    ("cpu-update-amx", "cpu-kernels-amx.json", update_table, (KERNELS,)),
)


def filled(page: str, marker: str, content: str) -> str:
    """Return ``page`` with ``content`` between the markers."""
    start = f"<!-- {marker} -->"
    end = f"<!-- /{marker} -->"
    pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"a page has no {start} ... {end}")
    return pattern.sub(lambda _: f"{start}\n\n{content}\n\n{end}", page)


def measured(file: str, make: Callable[[dict[str, Any]], str]) -> str:
    """Return the table of a result."""
    return make(json.loads((RESULTS / file).read_text("utf-8")))


def main() -> int:
    """Compare or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace what differs")
    write = parser.parse_args().write
    outdated = set()
    contents = [(marker, measured(file, make), paths) for marker, file, make, paths in TABLES]
    contents.append(("strategies", strategies_table(), (ORCHESTRATE,)))
    for marker, content, paths in contents:
        for path in paths:
            page = path.read_text(encoding="utf-8")
            wanted = filled(page, marker, content)
            if page != wanted:
                outdated.add(path.name)
                if write:
                    path.write_text(wanted, encoding="utf-8")
    if outdated and not write:
        print(
            f"out of date: {', '.join(sorted(outdated))}; rewrite with: make generate",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
