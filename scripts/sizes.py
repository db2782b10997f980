"""Print the size of each package in AST nodes, and hold the budgets.

Usage::

    python scripts/sizes.py           # a table
    python scripts/sizes.py --check   # also fail if a package exceeds its budget

The number of AST nodes of a package's ``src`` says how much there is to read: unlike lines, it
cannot be lowered by packing or by wider lines. Nodes per code line say how dense the code is. A
code line is a line that is neither blank, nor a comment, nor part of a docstring. The budgets and
the reasons for the large ones are in ``docs/explanation/layers.md``.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

#: Largest number of AST nodes by package, in thousands. A change that needs more gives something
#: else in the package up first.
BUDGETS = {
    "core": 61.2,
    "arb-ternary-train": 67.7,
    "arb-ternary-distributed": 18,
    "arb-ternary-interchange": 51.8,
    "arb-ternary-chat": 7.7,
    "arb-ternary-evals": 3.6,
    "arb-ternary-manifests": 15.6,
    "arb-ternary-text": 61.4,
    "arb-ternary-track": 5,
    "arb-ternary-trainers": 13.9,
    "arb-ternary-upcycle": 48.1,
    "arb-ternary-progressive": 30.5,
    "arb-ternary-orchestrator": 25.5,
    "arb-ternary-testing": 32.1,
    "arb-ternary-votes": 10,
    "arb-ternary-gqc": 9.3,
    "arb-ternary-qat": 2,
    "arb-ternary-serve": 18.5,
    "arb-ternary-signgsd": 3.4,
    "arb-ternary-vision": 19.2,
    "arb-ternary-audio": 9.6,
    "arb-ternary-diffusion": 10.5,
    "arb-ternary-cpu": 15.2,
    "arb-ternary-triton": 37.2,
    "arb-ternary-tilelang": 27,
}
#: The same for ``benchmarks``, which is not installed and not part of the total.
BENCHMARKS = 30
#: Largest number of AST nodes of all packages together, in thousands. It only falls.
TOTAL = 603
#: Most AST nodes per code line of all packages together, and of one of them.
DENSITY = 8.6
DENSEST = 9.1
#: Mostly kernels, which are formulas.
DENSITIES = {"arb-ternary-tilelang": 9.3}


class Size(NamedTuple):
    """The size of a package: AST nodes and code lines."""

    nodes: int
    lines: int

    @property
    def density(self) -> float:
        """AST nodes per code line."""
        return self.nodes / max(self.lines, 1)


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the line numbers that docstrings take up."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def measure(folder: Path) -> Size:
    """Return the size of all Python files below ``folder``, without templates and tests."""
    nodes = 0
    lines = 0
    for file in sorted(folder.rglob("*.py")):
        if "templates" in file.parts or file.relative_to(folder).parts[0] == "tests":
            continue
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
        nodes += sum(1 for _ in ast.walk(tree))
        documentation = docstring_lines(tree)
        for number, line in enumerate(text.splitlines(), 1):
            code = line.strip()
            if code and not code.startswith("#") and number not in documentation:
                lines += 1
    return Size(nodes, lines)


def packages() -> dict[str, Size]:
    """Return the size of the ``src`` of every package, by the name of its folder."""
    folders = [ROOT / "core", *ROOT.glob("plugins/*"), *ROOT.glob("backends/*")]
    return {folder.name: measure(folder / "src") for folder in sorted(folders)}


def main() -> int:
    """Print the table; with ``--check`` return 1 if a package exceeds its budget."""
    sizes = packages()
    total = sum(size.nodes for size in sizes.values())
    density = Size(total, sum(size.lines for size in sizes.values())).density
    sizes["benchmarks"] = measure(ROOT / "benchmarks")
    budgets = {**BUDGETS, "benchmarks": BENCHMARKS}
    faults = []
    print(f"{'package':28} {'nodes':>8} {'budget':>8} {'code lines':>10} {'nodes/line':>10}")
    for name, size in sizes.items():
        budget = budgets.get(name)
        shown = "none" if budget is None else f"{budget * 1000:,.0f}"
        print(f"{name:28} {size.nodes:8,} {shown:>8} {size.lines:10,} {size.density:10.1f}")
        if budget is None:
            faults.append(f"{name} has no budget: add one to {Path(__file__).name}")
        elif size.nodes > budget * 1000:
            faults.append(f"{name} has {size.nodes:,} AST nodes, its budget is {shown}")
        densest = DENSITIES.get(name, DENSEST)
        if size.density > densest:
            faults.append(f"{name} has {size.density:.1f} nodes per code line, more than {densest}")
    print(f"{'together':28} {total:8,} {TOTAL * 1000:8,} {'':10} {density:10.1f}")
    if density > DENSITY:
        faults.append(f"all packages have {density:.2f} nodes per code line, more than {DENSITY}")
    if total > TOTAL * 1000:
        faults.append(f"all packages together have {total:,} AST nodes, more than {TOTAL * 1000:,}")
    if "--check" not in sys.argv[1:]:
        return 0
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
