"""Kernels compiled for GPUs that need not be here: no register is spilled, and the int8 matrix
units are used.
"""

from __future__ import annotations

import pytest

from arb_ternary_tilelang.compiled import ARCHITECTURES, HOT_KERNELS, compile_kernel
from arb_ternary_tilelang.probe import cuda_compiler

pytestmark = pytest.mark.skipif(
    cuda_compiler() is None, reason="no nvcc: kernels for CUDA cannot be compiled here"
)

#: What the assembly must contain, by the beginning of the instruction.
INT8 = {
    "sm_80": "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8",
    "sm_90a": "wgmma.mma_async.sync.aligned",
}
HALF = {
    "sm_80": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16",
    "sm_90a": "wgmma.mma_async.sync.aligned",
}


#: Compiled on every run of the tests: a product for one GPU. The rest takes minutes.
ALWAYS = (("linear int8", ARCHITECTURES[0]),)
COMPILED = [
    pytest.param(name, arch, marks=() if (name, arch) in ALWAYS else pytest.mark.slow)
    for name in HOT_KERNELS
    for arch in ARCHITECTURES
]


@pytest.mark.parametrize(("name", "arch"), COMPILED)
def test_hot_kernel_spills_nothing_and_uses_its_units(name: str, arch: str) -> None:
    made = compile_kernel(name, arch)
    assert (made.spill_stores, made.spill_loads) == (0, 0)
    assert 0 < made.registers <= 255
    assert made.shared <= (163 if arch == "sm_80" else 227) * 1024
    if "M = 1" in name:
        assert made.instructions == ("dp4a.s32.s32",)
    elif "int8" in name:
        assert made.instructions
        assert all(instruction.startswith(INT8[arch]) for instruction in made.instructions)
        assert all("s32.s8.s8" in instruction for instruction in made.instructions)
    elif "bfloat16" in name:
        assert made.instructions
        assert all(instruction.startswith(HALF[arch]) for instruction in made.instructions)
        assert all("f32.bf16.bf16" in instruction for instruction in made.instructions)
