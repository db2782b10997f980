"""The table of what is compiled for GPUs that need not be there: kernels, sizes and targets, with
counts.

``python tests/gpu/triton_shapes.py`` goes through the tests of ``test_triton_shapes.py`` and counts
what they translate instead of translating it; ``--write`` puts the table into
benchmarks/reports/gpu-kernels.md.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest
from triton_launches import Launch, Specialised, specialise

TESTS: Final = Path(__file__).with_name("test_triton_shapes.py")
PAGE: Final = Path(__file__).parents[2] / "benchmarks/reports/gpu-kernels.md"
#: Stands in the place of sizes where the conformance kit chose them.
KIT: Final = "the kit"
#: Arguments of kernels that are sizes of operands.
_SIZES: Final = frozenset({"terms", "rows", "outputs", "columns", "voted_rows", "count", "groups"})
_PLACE: Final = re.compile(r"(<!-- compiled-shapes -->\n).*?(<!-- /compiled-shapes -->)", re.DOTALL)


class Counted:
    """A plugin of pytest that counts launches by kernel, sizes and target; equal ones count once.

    Attributes:
        found: kernel, then M x N x K or :data:`KIT`, to the launches and their targets.
        sizes: kernel to the sizes that it has in the kit, as it names them.
    """

    def __init__(self) -> None:
        self.found: dict[str, dict[str, set[tuple[str, Specialised]]]] = defaultdict(
            lambda: defaultdict(set)
        )
        self.sizes: dict[str, set[tuple[tuple[str, int], ...]]] = defaultdict(set)
        self._column = KIT

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for module in {item.module for item in items}:
            module._translate = self._count

    def pytest_runtest_setup(self, item: Any) -> None:
        self._column = KIT if item.cls else " x ".join(map(str, item.callspec.params["sizes"]))

    def _count(self, launches: Iterable[Launch], target: str) -> None:
        for launch in launches:
            kernel = launch.kernel.__name__
            self.found[kernel][self._column].add((target, specialise(launch)))
            if self._column == KIT:
                named = zip(launch.kernel.arg_names, launch.arguments, strict=False)
                self.sizes[kernel].add(
                    tuple((name, value) for name, value in named if name in _SIZES)
                )


def table(counted: Counted) -> str:
    """Rows are kernels. Columns are M x N x K, the kit, its sizes, and all, where what is equal
    counts once.
    """
    found = counted.found
    columns = [*dict.fromkeys(sizes for of in found.values() for sizes in of if sizes != KIT), KIT]
    lines = [
        f"| kernel | {' | '.join(columns)} | its sizes | all |",
        "|---|" + "---:|" * (len(columns) + 2),
    ]
    rows = []
    for kernel in sorted(found):
        each = [len(found[kernel][sizes]) for sizes in columns]
        rows.append([*each, len(counted.sizes[kernel]), len(set().union(*found[kernel].values()))])
        lines.append(f"| `{kernel}` | {' | '.join(map(str, rows[-1]))} |")
    sums = [str(sum(column)) for column in zip(*rows, strict=True)]
    return "\n".join([*lines, f"| {len(found)} kernels | {' | '.join(sums)} |"])


def main() -> int:
    """Count, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into the page")
    write = parser.parse_args().write
    counted = Counted()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0"]
    chosen = [*options, "-k", "TestEveryLaunch or sizes_of_one", str(TESTS)]
    code = pytest.main(chosen, plugins=[counted])
    if code:
        return int(code)
    made = table(counted)
    print(made)
    if write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(
            _PLACE.sub(lambda place: f"{place[1]}\n{made}\n\n{place[2]}", page), encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main())
