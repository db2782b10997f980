"""The package: probe, registration, selection, and what a user reads where it cannot work."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from arb_ternary.backends.protocol import (
    COMBINED_OPS,
    FUSED_VOTES,
    NARROW_NOISE,
    NARROW_VOTES,
    OPTIONAL_OPS,
    REQUIRED_OPS,
    ROW_SHARDS,
)
from arb_ternary.backends.select import BackendRequest, get_backend, select
from arb_ternary.errors import EnvironmentProblem
from arb_ternary_distributed.wire import WIRE_KERNELS
from arb_ternary_triton import arguments
from arb_ternary_triton import launch as launching
from arb_ternary_triton import probe as probing
from arb_ternary_triton.plugin import INTERPRET

TORCH = torch.__version__


@pytest.fixture
def triton_release(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Messages name the release of Triton; here it is always the same."""
    monkeypatch.setattr(probing, "_release", lambda: "3.9.0")
    return monkeypatch


def _forced(device: str) -> EnvironmentProblem:
    with pytest.raises(EnvironmentProblem) as caught:
        select(BackendRequest("triton", "ARB_TERNARY_BACKEND", device))
    assert caught.value.exit_code == 3
    return caught.value


def test_every_op_is_its_own() -> None:
    backend = get_backend("triton")
    assert set(backend.kernels) == {
        *REQUIRED_OPS,
        *OPTIONAL_OPS,
        *(set(COMBINED_OPS) - {"add_votes"}),
        *WIRE_KERNELS,
        "votes.sums_to_quanta",
    }
    assert backend.capabilities == {FUSED_VOTES, NARROW_NOISE, NARROW_VOTES, ROW_SHARDS}
    for op, kernel in backend.kernels.items():
        assert kernel.__module__.startswith("arb_ternary_triton"), op


def test_without_triton_a_forced_backend_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probing, "find_spec", lambda _name: None)
    error = _forced("cpu")
    assert error.what == (
        "ARB_TERNARY_BACKEND: backend 'triton' cannot be used on cpu: "
        "triton is not installed: pip install triton (Linux only)"
    )
    assert re.fullmatch(r"usable on cpu: (\w+, )*torch(, \w+)*", error.hint)


def test_an_old_triton_is_named_with_the_release_that_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probing, "_release", lambda: "3.1.0+git")
    assert _forced("cpu").what == (
        "ARB_TERNARY_BACKEND: backend 'triton' cannot be used on cpu: "
        "triton 3.1.0+git is too old: pip install 'triton>=3.4'"
    )


@pytest.mark.skipif("+cpu" not in TORCH, reason="torch is built for a GPU")
def test_without_cuda_in_torch_a_forced_backend_says_so(triton_release: pytest.MonkeyPatch) -> None:
    triton_release.setenv(INTERPRET.name, "0")
    assert _forced("cuda").what == (
        f"ARB_TERNARY_BACKEND: backend 'triton' cannot be used on cuda: torch {TORCH} is built "
        f"without CUDA and ROCm"
    )


def test_without_a_driver_a_forced_backend_says_so(triton_release: pytest.MonkeyPatch) -> None:
    from arb_ternary.backends import reference_probe

    triton_release.setenv(INTERPRET.name, "0")
    triton_release.setattr(reference_probe, "version", lambda _name: "2.13.0")
    triton_release.setattr(reference_probe, "_DEVICE_NODES", ())
    triton_release.setattr(reference_probe.shutil, "which", lambda _name: None)
    assert _forced("cuda:1").what == (
        "ARB_TERNARY_BACKEND: backend 'triton' cannot be used on cuda:1: no CUDA or ROCm driver "
        "was found"
    )


def test_the_cpu_is_refused_without_the_interpreter(triton_release: pytest.MonkeyPatch) -> None:
    triton_release.delenv(INTERPRET.name, raising=False)
    error = _forced("cpu")
    assert error.what == (
        "ARB_TERNARY_BACKEND: backend 'triton' cannot be used on cpu: "
        "triton 3.9.0 compiles for GPUs only; TRITON_INTERPRET=1 runs its interpreter"
    )
    assert re.fullmatch(r"usable on cpu: (\w+, )*torch(, \w+)*", error.hint)


def test_a_gpu_is_refused_with_the_interpreter(triton_release: pytest.MonkeyPatch) -> None:
    from arb_ternary.backends.protocol import ProbeResult

    triton_release.setenv(INTERPRET.name, "1")
    triton_release.setattr(probing, "probe_torch", lambda _device: ProbeResult(True, "torch"))
    result = probing.probe("cuda")
    assert (result.usable, result.reason) == (
        False,
        "TRITON_INTERPRET=1 runs kernels on the CPU; unset it",
    )


@pytest.mark.parametrize("value", ["1", "true", " ON "])
def test_the_interpreter_serves_the_cpu(value: str, triton_release: pytest.MonkeyPatch) -> None:
    triton_release.setenv(INTERPRET.name, value)
    result = probing.probe("cpu")
    assert (result.usable, result.reason) == (
        True,
        "triton 3.9.0 in its interpreter, for tests: slow",
    )
    assert result.last_resort


def test_the_interpreter_is_nobodys_default(triton_release: pytest.MonkeyPatch) -> None:
    triton_release.setenv(INTERPRET.name, "1")
    chosen = select(BackendRequest())
    assert chosen.name != "triton"
    assert dict(chosen.rejected)["triton"] == "triton 3.9.0 in its interpreter, for tests: slow"


def test_probing_and_registering_import_neither_torch_nor_triton() -> None:
    program = (
        "import sys, arb_ternary_triton.plugin; arb_ternary_triton.plugin.arb_register_backends(); "
        "from arb_ternary_triton.probe import probe; probe('cpu'), probe('cuda'); "
        "print([name for name in ('torch', 'triton', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_tensors_on_the_wrong_device_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (arguments, launching):
        monkeypatch.setattr(module, "INTERPRETED", False)
    with pytest.raises(TypeError, match="values must be on a GPU, got cpu"):
        get_backend("triton").kernels["pack"](torch.zeros(3, 3, dtype=torch.int8))
