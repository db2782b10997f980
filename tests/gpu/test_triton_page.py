"""The page's table of what is compiled for GPUs that need not be there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from triton_code import CASES, every_option
from triton_launches import TARGETS

import arb_ternary_triton
from arb_ternary.environment import for_child

SHAPES = Path(__file__).with_name("triton_shapes.py")
PAGE = Path(__file__).parents[2] / "benchmarks/reports/gpu-kernels.md"


def _table() -> list[str]:
    """The lines of the table on the page."""
    place = PAGE.read_text(encoding="utf-8").partition("<!-- compiled-shapes -->")[2]
    return place.partition("<!-- /compiled-shapes -->")[0].split("\n")[2:-2]


def test_every_kernel_is_translated_for_some_sizes() -> None:
    source = Path(arb_ternary_triton.__file__).parent
    written = {
        name
        for file in source.rglob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.M)
    }
    rows = {
        row.split("`")[1]: int(row.rstrip(" |").rpartition("| ")[2])
        for row in _table()
        if "`" in row
    }
    assert rows.keys() == written
    assert all(count > 0 for count in rows.values())


def test_the_page_says_how_many_cases_are_compiled() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert f"| Triton | the {len(CASES)} cases of the [table](#compiled) |" in page
    calls = len(every_option())
    assert (
        f"| Triton | every kernel with every option that a call can ask for, {calls} calls |"
        in page
    )


def test_the_page_lists_every_kernel_and_target_without_a_spill() -> None:
    ours = PAGE.read_text(encoding="utf-8").partition("\n## Triton\n")[2].partition("\n## ")[0]
    rows = [
        line.removeprefix("| ").split(" | ") for line in ours.splitlines() if line.startswith("| ")
    ]
    spills = {(row[0], row[1]): row[4] for row in rows if len(row) > 7 and row[1] in TARGETS}
    assert spills == {(case, target): "0" for case in CASES for target in TARGETS}


@pytest.mark.slow
def test_the_table_is_what_is_translated() -> None:
    environment = for_child(TRITON_INTERPRET="0")
    done = subprocess.run(
        [sys.executable, str(SHAPES)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("|")] == _table()
