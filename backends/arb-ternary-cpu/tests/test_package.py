"""The package: instruction sets, the probe, registration, selection."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from arb_ternary.backends.protocol import (
    COMBINED_OPS,
    OPTIONAL_OPS,
    REQUIRED_OPS,
)
from arb_ternary.backends.select import BackendRequest, get_backend, select
from arb_ternary.environment import for_child
from arb_ternary.errors import EnvironmentProblem, UsageProblem
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_cpu import _native
from arb_ternary_cpu.backend import build
from arb_ternary_cpu.isa import ISAS, chosen_isa, usable_isas
from arb_ternary_cpu.plugin import ISA
from arb_ternary_cpu.probe import probe
from arb_ternary_cpu.sources import check_sources, digest_of
from arb_ternary_distributed.wire import WIRE_KERNELS
from arb_ternary_text.models.block_kernels import BLOCK_OPS
from arb_ternary_text.models.native_decode import DECODE_ROWS, DECODE_STEP
from arb_ternary_text.models.trit_vector import VECTOR_OPS
from arb_ternary_vision.convolution_ops import CONVOLUTION_OPS
from arb_ternary_votes.levels import SUMS_TO_QUANTA

#: In this repository; an installed wheel has none.
SOURCES = Path(__file__).parents[1] / "src" / "native"


def test_scalar_is_always_usable_and_the_fastest_comes_first() -> None:
    usable = usable_isas()
    assert usable[-1] == "scalar"
    assert set(usable) <= set(ISAS)
    assert chosen_isa() == usable[0]


def test_unknown_instruction_set_suggests_usable_ones() -> None:
    with pytest.raises(UsageProblem) as caught:
        chosen_isa("avx512vni")
    assert "avx512vni" in caught.value.what
    assert "did you mean 'avx512vnni'?" in caught.value.hint
    assert ", ".join(usable_isas()) in caught.value.hint


def test_instruction_set_of_another_processor_is_an_error() -> None:
    foreign = next(isa for isa in ISAS if isa not in usable_isas())
    with pytest.raises(EnvironmentProblem, match=f"{foreign!r} cannot be used on this processor"):
        build(foreign)


def test_the_variable_forces_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in usable_isas():
        monkeypatch.setenv(ISA.name, f" {isa.upper()} ")
        assert chosen_isa() == isa
        assert probe("cpu").reason == f"instruction set {isa}"
    monkeypatch.setenv(ISA.name, "sse9")
    with pytest.raises(UsageProblem, match=ISA.name):
        chosen_isa()
    result = probe("cpu")
    assert not result.usable
    assert "sse9" in result.reason
    monkeypatch.setenv(ISA.name, "")
    assert chosen_isa() == usable_isas()[0]


def test_the_variable_is_read_in_a_process_of_its_own() -> None:
    program = (
        "from arb_ternary.backends.select import get_backend; import torch; b = "
        "get_backend('cpu'); "
        "print(b.isa, b.kernels['pack'](torch.zeros(3, 3, dtype=torch.int8)).shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=for_child(**{ISA.name: "scalar"}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "scalar torch.Size([1, 1, 64])"


@pytest.mark.skipif("amx" not in usable_isas(), reason="a processor without AMX")
def test_a_process_that_is_refused_tiles_goes_without_them() -> None:
    # Linux gives them to nobody whose stack for signals could not hold them: 8 KiB of tiles and
    # what was there before.
    program = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, len(room))),
    None) == 0
from arb_ternary_cpu.isa import usable_isas
print(usable_isas()[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "avx512bf16"


def test_a_module_of_other_sources_is_refused(tmp_path: Path) -> None:
    # CMake computed the module's own.
    assert digest_of(SOURCES) == _native.sources
    folder = tmp_path / "package" / "src" / "native"
    check_sources(folder)  # a wheel has none
    shutil.copytree(SOURCES, folder)
    check_sources(folder)
    with (folder / "decode.h").open("a") as file:
        file.write("\n")
    with pytest.raises(EnvironmentProblem, match="built from other sources") as caught:
        check_sources(folder)
    assert f"pip install --no-deps {tmp_path / 'package'}" in caught.value.hint
    shutil.copy(SOURCES / "decode.h", folder)
    (folder / "another.cpp").touch()
    with pytest.raises(EnvironmentProblem):
        check_sources(folder)


def test_the_probe_refuses_other_devices() -> None:
    assert not probe("cuda:0").usable


def test_every_op_is_native() -> None:
    kernels = get_backend("cpu").kernels
    assert set(kernels) == {
        *REQUIRED_OPS,
        *OPTIONAL_OPS,
        *(set(COMBINED_OPS) - {"apply_together", "quantize_several"}),
        *WIRE_KERNELS,
        SUMS_TO_QUANTA,
        *CONVOLUTION_OPS,
        *BLOCK_OPS,
        *VECTOR_OPS,
        DECODE_ROWS,
        DECODE_STEP,
    }
    for op, kernel in kernels.items():
        function = getattr(kernel, "func", kernel)
        assert function.__module__.startswith("arb_ternary_cpu"), op


def test_auto_prefers_it_on_the_cpu() -> None:
    assert select(BackendRequest()).name == "cpu"


def test_probing_and_registering_import_no_torch() -> None:
    program = (
        "import sys, arb_ternary_cpu.plugin; arb_ternary_cpu.plugin.arb_register_backends(); "
        "from arb_ternary_cpu.probe import probe; assert probe('cpu').usable; print('torch' in "
        "sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def _trained(backend: str, steps: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer = TernaryLinear(70, 40, group_size=32, bias=True, gradients="int8", backend=backend)
    results = []
    for step in range(steps):
        x = torch.randn(24, 70, generator=torch.Generator().manual_seed(step)).requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        results += [y.detach(), x.grad]
    return [
        *results,
        *(
            value
            for _, value in sorted(layer.state_dict().items())
            if isinstance(value, torch.Tensor)
        ),
    ]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_layer_that_votes_has_the_bits_of_the_torch_backend(threads: int) -> None:
    wanted = _trained("torch")
    torch.set_num_threads(threads)
    got = _trained("cpu")
    torch.set_num_threads(1)
    assert len(got) == len(wanted)
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))
