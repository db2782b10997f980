"""The package: registration, the probe, selection, and what is said where something is missing."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.backends import reference_probe
from arb_ternary.backends.protocol import (
    FUSED_VOTES,
    NARROW_NOISE,
    NARROW_VOTES,
    OPTIONAL_OPS,
    REQUIRED_OPS,
    WeightShape,
)
from arb_ternary.backends.select import BackendRequest, get_backend, select
from arb_ternary.backends.vote_state import new_state
from arb_ternary.environment import for_child
from arb_ternary.errors import EnvironmentProblem
from arb_ternary_tilelang import lane as lanes
from arb_ternary_tilelang import probe as probes
from arb_ternary_tilelang.kernels import storage
from arb_ternary_tilelang.lane import Lane, lane_of


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No compiler anywhere."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(probes, "_CUDA_HOME", str(tmp_path))


def refusal(device: str) -> str:
    with pytest.raises(EnvironmentProblem) as caught:
        select(BackendRequest("tilelang", "ARB_TERNARY_BACKEND", device))
    return caught.value.what


def test_every_op_is_the_package_s_own() -> None:
    kernels = get_backend("tilelang").kernels
    assert set(kernels) == {*REQUIRED_OPS, *OPTIONAL_OPS}
    for op, kernel in kernels.items():
        assert kernel.__module__.startswith("arb_ternary_tilelang"), op
    assert get_backend("tilelang").capabilities == {FUSED_VOTES, NARROW_NOISE, NARROW_VOTES}


def test_it_is_used_when_it_is_named_and_not_otherwise() -> None:
    assert select(BackendRequest("tilelang")).name == "tilelang"
    assert select(BackendRequest()).name != "tilelang"


def test_probing_and_registering_import_nothing_heavy() -> None:
    program = (
        "import sys, arb_ternary_tilelang.plugin; "
        "arb_ternary_tilelang.plugin.arb_register_backends(); "
        "from arb_ternary_tilelang.probe import probe; probe('cpu'), probe('cuda'); "
        "print([name for name in ('torch', 'tilelang', 'tvm', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_importing_tilelang_leaves_the_environment_alone() -> None:
    program = (
        "import os; before = dict(os.environ); from arb_ternary_tilelang.lane import cpu_lane; "
        "cpu_lane(); print(dict(os.environ) == before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=for_child(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("missing", ["torch", "tilelang"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_missing_library_is_named(
    missing: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (probes, reference_probe):
        monkeypatch.setattr(
            module, "find_spec", lambda name: None if name == missing else find_spec(name)
        )
    assert refusal(device) == (
        f"ARB_TERNARY_BACKEND: backend 'tilelang' cannot be used on {device}: {missing} is not "
        f"installed"
    )


@pytest.mark.usefixtures("no_programs")
def test_a_missing_compiler_for_the_cpu_is_named() -> None:
    assert refusal("cpu") == (
        "ARB_TERNARY_BACKEND: backend 'tilelang' cannot be used on cpu: "
        "its kernels need a C++ compiler (g++, clang++, c++): none was found"
    )


@pytest.mark.usefixtures("no_programs")
def test_a_compiler_that_was_chosen_and_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "icpx")
    assert refusal("cpu").endswith("its kernels need a C++ compiler (icpx): none was found")


@pytest.mark.parametrize(
    ("torch_release", "visible", "driver", "reason"),
    [
        ("2.13.0+cpu", "all", True, "torch 2.13.0+cpu is built without CUDA and ROCm"),
        (
            "2.13.0+rocm7.0",
            "all",
            True,
            "torch 2.13.0+rocm7.0 is built for ROCm, and the kernels are for CUDA",
        ),
        ("2.13.0+cu130", "-1", True, "CUDA_VISIBLE_DEVICES hides every device"),
        ("2.13.0+cu130", "all", False, "no CUDA or ROCm driver was found"),
        (
            "2.13.0+cu130",
            "all",
            True,
            "its kernels need nvcc: none was found in CUDA_HOME, PATH or /usr/local/cuda",
        ),
    ],
)
@pytest.mark.usefixtures("no_programs")
def test_what_is_missing_for_cuda_is_named(
    torch_release: str,
    visible: str,
    driver: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    node = tmp_path / "nvidiactl"
    if driver:
        node.touch()
    monkeypatch.setattr(reference_probe, "_DEVICE_NODES", (str(node),))
    monkeypatch.setattr(reference_probe, "version", lambda _name: torch_release)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (
        refusal("cuda")
        == f"ARB_TERNARY_BACKEND: backend 'tilelang' cannot be used on cuda: {reason}"
    )


def test_a_device_that_nobody_wrote_kernels_for_is_refused() -> None:
    assert (
        refusal("mps")
        == "ARB_TERNARY_BACKEND: backend 'tilelang' cannot be used on mps: it serves cuda, cpu"
    )
    assert probes.probe("mps").reason == "it has no kernels for 'mps'"


@pytest.mark.usefixtures("no_programs")
@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("c", "g++ or clang++ or c++"), ("cuda", "nvcc, in CUDA_HOME, PATH or /usr/local/cuda")],
)
def test_compiler_that_goes_missing_is_an_error(kind: str, wanted: str) -> None:
    made = lanes.cpu_lane() if kind == "c" else lanes.cuda_lane("sm_90a")
    with pytest.raises(EnvironmentProblem) as caught:
        made.kernel(storage.pack, N=1, K=1)
    assert caught.value.what == (
        f"backend 'tilelang' compiles its kernels when they are first used, and found no compiler: "
        f"{wanted}"
    )
    assert caught.value.hint == "install one, or choose another backend: arb backends list"


def test_a_compiler_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = lanes.cpu_lane()
    import tilelang

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise RuntimeError("Compilation failed!\ncc1plus: out of memory")

    monkeypatch.setattr(tilelang, "compile", refuse)
    monkeypatch.setattr(lanes, "cpu_compiler", lambda: "/usr/bin/g++")
    with pytest.raises(EnvironmentProblem) as caught:
        lane.kernel(storage.pack, N=1, K=1)
    assert caught.value.what == (
        "backend 'tilelang': /usr/bin/g++ with -O3 -march=native -ffp-contract=off -w could not "
        "build a kernel: cc1plus: out of memory"
    )


def test_a_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = lanes.cpu_lane()
    built: list[Any] = []
    monkeypatch.setattr(
        Lane, "_compile", lambda self, function, name: built.append(function) or print
    )
    assert made.kernel(storage.pack, N=1, K=1) is made.kernel(storage.pack, N=7, K=300)
    assert len(built) == 1


def test_options_are_constants_on_cuda_and_arguments_in_cpp() -> None:
    on_cuda = lanes.cuda_lane("sm_80")
    as_cpp = lanes.cpu_lane()
    assert [on_cuda.option(value) for value in (True, False, 2)] == [True, False, 2]
    assert [as_cpp.option(value) for value in (True, False, 2)] == [None, None, None]
    assert lanes.given(True, 0) is True
    assert lanes.given(None, 0) is False


# --- arguments


def test_a_dtype_that_the_kernels_do_not_serve_is_refused() -> None:
    kernels = get_backend("tilelang").kernels
    with pytest.raises(
        TypeError,
        match=r"x: the tilelang backend serves float32, bfloat16 and float16, got torch\.float64",
    ):
        kernels["quantize_rows"](torch.zeros(2, 3, dtype=torch.float64))


def test_a_group_that_cuts_a_word_is_refused() -> None:
    packed = torch.zeros(2, 12, dtype=torch.uint8)
    with pytest.raises(
        ValueError, match="group_size must be a multiple of 16, or all of a row, got 24"
    ):
        get_backend("tilelang").kernels["unpack"](packed, WeightShape(2, 48, 24))


def test_a_weight_of_another_layout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"packed must be \[2, 12\], got \[2, 10\]"):
        get_backend("tilelang").kernels["unpack"](
            torch.zeros(2, 10, dtype=torch.uint8), WeightShape(2, 40, 32)
        )


def test_non_contiguous_votes_cannot_be_written() -> None:
    packed = torch.zeros(2, 12, dtype=torch.uint8)
    votes = torch.zeros(40, 2, dtype=torch.int8).t()
    state = new_state(
        WeightShape(2, 40, 32), packed, torch.zeros(2, 2, dtype=torch.int8), votes, "tilelang"
    )
    with pytest.raises(ValueError, match="votes is written in place and must be contiguous"):
        get_backend("tilelang").kernels["apply_votes"](state, 3, 0)


def test_ids_outside_the_table_are_refused() -> None:
    shape = WeightShape(2, 40, 32)
    packed = torch.zeros(2, 12, dtype=torch.uint8)
    exponent = torch.zeros(2, 2, dtype=torch.int8)
    with pytest.raises(IndexError, match=r"ids must lie in 0..1, got -1..0"):
        get_backend("tilelang").kernels["embedding"](
            torch.tensor([0, -1]), packed, exponent, shape, torch.float32
        )


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
        ((12, 1), "sm_121a"),
    ],
)
def test_lane_of_a_device_has_the_instructions_of_its_target(
    capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert lane_of(torch.device("cuda")).arch == arch
