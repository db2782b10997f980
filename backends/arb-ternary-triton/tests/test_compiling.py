"""Kernels compiled for GPUs that need not be there: no spills, and int8 products on tensor
cores.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.environment import for_child
from arb_ternary_triton import compiling
from arb_ternary_triton.compiling import CASES

#: The instruction that multiplies int8, by target.
TENSOR = {
    "sm_80": r"mma\.sync\.aligned.*\.s8\.s8\.s32",
    "sm_90a": r"wgmma.*\.s8\.s8",
    "gfx942": r"v_mfma_i32_.*i8",
}
#: Shared memory that a program may have, in bytes.
SHARED = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024, "gfx942": 64 * 1024}
ROW = "linear int8, M = 1"
#: What every test run compiles, for every target: the forward product both ways, and the votes.
FEW = [ROW, "linear int8, M = 2048", "cast_votes int8, M = 2048"]


def _compile(
    targets: Iterable[str], cases: Iterable[str] = (), *options: str
) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "arb_ternary_triton.compiling", "--json", *options]
    for target in targets:
        command += ["--target", target]
    for case in cases:
        command += ["--case", case]
    environment = for_child(TRITON_INTERPRET="0")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout))


@pytest.mark.parametrize(
    "cases", [FEW, pytest.param(list(CASES), marks=pytest.mark.slow)], ids=["a few", "all"]
)
def test_hot_kernels_use_tensor_cores_without_spills(cases: list[str]) -> None:
    found = _compile(TENSOR, cases)
    assert [(one["case"], one["target"]) for one in found] == [
        (case, target) for case in cases for target in TENSOR
    ]
    for one in found:
        case = one["case"]
        target = one["target"]
        assert one["spills"] == 0, (case, target)
        assert 0 < one["registers"] <= (512 if target == "gfx942" else 255), (case, target)
        assert one["shared"] <= SHARED[target], (case, target)
        if "int8, " in case and case != ROW:
            assert any(re.search(TENSOR[target], name) for name in one["instructions"]), (
                case,
                target,
            )
        if case == ROW:
            dots = [name for name in one["instructions"] if name.startswith("dp4a")]
            assert bool(dots) == (target != "gfx942")


@pytest.mark.slow
@pytest.mark.parametrize("target", TENSOR)
def test_every_other_kernel_compiles_with_hardly_a_spill(target: str) -> None:
    found = _compile([target], (), "--others")
    assert len({one["kernel"] for one in found}) >= 12
    for one in found:
        # two registers or so of a float32 product on ordinary units
        assert one["spills"] <= 16, one
        assert one["shared"] <= SHARED[target], one


def test_the_page_lists_every_kernel_and_target_without_a_spill() -> None:
    page = Path(__file__).parents[3] / "plugins/arb-ternary-bench/reports/gpu-kernels.md"
    if not page.exists():
        pytest.skip("the documentation is not beside this package")
    ours = page.read_text(encoding="utf-8").partition("\n## Triton\n")[2].partition("\n## ")[0]
    rows = [
        line.removeprefix("| ").split(" | ") for line in ours.splitlines() if line.startswith("| ")
    ]
    spills = {(row[0], row[1]): row[4] for row in rows if len(row) > 6 and row[1] in TENSOR}
    assert spills == {(case, target): "0" for case in CASES for target in TENSOR}


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "INTERPRETED", True)
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        compiling.main(["--case", ROW, "--target", "sm_80"])
