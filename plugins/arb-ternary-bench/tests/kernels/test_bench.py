"""The bench from end to end, on small shapes, and its command."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from arb_ternary.backends import reference
from arb_ternary.errors import ArbError, EnvironmentProblem, UsageProblem
from arb_ternary_bench.cli.bench import bench
from arb_ternary_bench.kernels import bench as bench_module
from arb_ternary_bench.kernels import probes
from arb_ternary_bench.kernels.bench import KernelBench, run_kernel_bench
from arb_ternary_bench.kernels.ops import DEFAULT_OPS, OPS
from arb_ternary_bench.machine import commit

#: What readers of ``result.json`` rely on.
CELL_KEYS = {
    "op",
    "out_features",
    "in_features",
    "group_size",
    "rows_m",
    "cache",
    "read_bandwidth",
    "read_bandwidth_median",
    "int8_peak",
    "int8_peak_median",
    "bfloat16_peak",
    "bfloat16_peak_median",
    "baselines",
    "excluded",
    "rows",
}
ROW_KEYS = {
    "contender",
    "role",
    "name",
    "note",
    "checked",
    "seconds_min",
    "seconds_median",
    "calls",
    "copies",
    "rotated_bytes",
    "bytes",
    "operations",
    "bytes_per_second",
    "operations_per_second",
    "of_read_bandwidth",
    "of_int8_peak",
    "of_bfloat16_peak",
    "speedup",
    "speedup_median",
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_LEAST_BUFFER", 1 << 16)
    monkeypatch.setattr(probes, "_PEAK_EDGE", 64)
    monkeypatch.setattr(bench_module, "last_level_cache", lambda: bench_module_cache())


def bench_module_cache() -> Any:
    from arb_ternary_bench.kernels.cache import Cache

    return Cache(1 << 16, "a test")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(
        bench, ["kernels", "--backends", "torch", "--peers", "none", *arguments]
    )


SMALL = ("--shapes", "64x256", "--m", "1,3", "--seconds", "0.001")


def test_small_shapes_run_from_end_to_end(tmp_path: Path) -> None:
    done = invoke(*SMALL, "--ops", ",".join(OPS), "--group", "row", "--out", str(tmp_path))
    assert done.exit_code == 0, done.stderr or done.exception
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["format"], result["version"]) == ("arb-bench-kernels", 1)
    assert {cell["op"] for cell in result["cells"]} == set(OPS)
    for cell in result["cells"]:
        assert set(cell) == CELL_KEYS
        assert {frozenset(row) for row in cell["rows"]} == {frozenset(ROW_KEYS)}
        for row in cell["rows"]:
            assert 0 < row["seconds_min"] <= row["seconds_median"]
    machine = result["machine"]
    assert machine["backends"]["torch"].startswith("arb-ternary-core ")
    assert {
        "processor",
        "threads",
        "torch",
        "commit",
        "load_average",
        "torch_cpu_capability",
    } <= set(machine)
    assert (tmp_path / "table.md").read_text().startswith("| op |")
    assert "torch bfloat16" in done.stdout
    assert [line for line in done.stderr.splitlines() if "apply_scaled_votes 64x256" in line][1:]


def test_json_goes_to_standard_output_alone() -> None:
    done = invoke(*SMALL, "--cache", "hot", "--ops", "quantize_rows", "--json", "--threads", "1")
    result = json.loads(done.stdout)
    assert [(cell["rows_m"], cell["cache"]) for cell in result["cells"]] == [(1, "hot"), (3, "hot")]
    assert result["machine"]["threads"] == 1


def test_linear_is_compared_with_quantisation_and_int8_products() -> None:
    done = invoke(
        "--shapes", "64x256", "--m", "2", "--seconds", "0.001", "--ops", "linear", "--json"
    )
    rows = json.loads(done.stdout)["cells"][0]["rows"]
    assert [row["contender"] for row in rows][:4] == [
        "torch",
        "torch + quantize_rows",
        "torch bfloat16",
        "torch._int_mm",
    ]
    assert {row["role"] for row in rows} == {"backend", "torch bfloat16", "torch int8"}


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    invoke(*SMALL, "--ops", "quantize_rows", "--threads", str(before + 1))
    assert torch.get_num_threads() == before


def make(**changes: Any) -> KernelBench:
    sizes: dict[str, Any] = {
        "backends": ("torch",),
        "shapes": ((32, 64),),
        "rows": (2,),
        "groups": (32,),
        "ops": ("linear",),
        "caches": ("hot",),
        "seconds": 1e-3,
    }
    return KernelBench(**{**sizes, **changes})


def test_a_wrong_backend_ends_the_bench(changed: Callable[..., str]) -> None:
    name = changed(linear=lambda *arguments: reference.linear(*arguments) + 1)
    with pytest.raises(ArbError, match=r"changed: .* elements are wrong"):
        run_kernel_bench(make(backends=("torch", name)))


def test_a_wrong_baseline_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: right(a, b) + (a.shape[0] == 2))
    monkeypatch.setattr("arb_ternary.backends.reference.int_matmul", lambda a, b, _: right(a, b))
    cell = run_kernel_bench(make())["cells"][0]
    assert "torch._int_mm" not in [row["contender"] for row in cell["rows"]]
    assert (
        "elements are wrong"
        in next(each for each in cell["excluded"] if each["name"] == "torch._int_mm")["reason"]
    )


def test_groups_end_with_the_row_and_flips_have_one_cell_a_shape() -> None:
    bench = make(
        groups=(128, "row"),
        ops=("linear", "apply_scaled_votes"),
        rows=(1, 2),
        caches=("hot", "cold"),
    )
    cells = list(bench.cells(1 << 16, 1))
    assert {cell.group_size for cell in cells} == {64}
    assert sum(cell.op == "linear" for cell in cells) == 2 * 2 * 2
    assert sum(cell.op == "apply_scaled_votes" for cell in cells) == 2 * 2


def test_the_default_ops_exist() -> None:
    assert set(DEFAULT_OPS) <= set(OPS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shapes", "64"), "'64' is not NxK"),
        (("--shapes", "0x64"), "'0x64' is not NxK"),
        (("--shapes", ","), "it names nothing"),
        (("--m", "1,x"), "'x' is not a number of rows"),
        (("--m", "0"), "'0' is not a number of rows"),
        (("--group", "100"), "'100' is not one of 32, 64, 128, 256, row"),
        (("--ops", "liner"), "there is no op 'liner'; did you mean 'linear'?"),
        (("--threads", "0"), "0 is not in the range"),
        (("--seconds", "0"), "0.0 is not in the range"),
    ],
)
def test_a_wrong_argument_says_what_is_right(arguments: tuple[str, ...], message: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize("option", ["--backends", "--peers"])
def test_an_unknown_name_is_an_error(option: str) -> None:
    done = CliRunner().invoke(bench, ["kernels", option, "nonsense"])
    assert isinstance(done.exception, (UsageProblem, EnvironmentProblem))


def test_the_commit_is_that_of_the_checkout(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = [
            "git",
            "-C",
            str(tmp_path),
            "-c",
            "user.name=x",
            "-c",
            "user.email=x@example.org",
            *arguments,
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert commit(tmp_path) is None
    git("init")
    (tmp_path / "a.py").write_text("1\n")
    (tmp_path / "env").mkdir()
    git("add", "a.py")
    git("commit", "-m", "x")
    head = git("rev-parse", "HEAD")
    assert commit(tmp_path) == head
    # an environment inside somebody's checkout is not that checkout's code
    assert commit(tmp_path / "env") is None
    (tmp_path / "a.py").write_text("2\n")
    assert commit(tmp_path) == f"{head}+changes"
