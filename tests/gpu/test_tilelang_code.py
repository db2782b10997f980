"""Kernels compiled for GPUs that need not be here: no register is spilled, the memory of a block
suffices, the int8 matrix units are used, and few instructions are.

Counts of instructions describe compiled code. They are no measurement.
"""

from __future__ import annotations

import pytest
from machine_code import parse, tool
from tilelang_code import (
    ARCHITECTURES,
    COUNTED,
    HOT_KERNELS,
    SHARED_LIMITS,
    Counted,
    code_of,
    compile_kernel,
)
from tilelang_variants import ODD, Variant, covering

from arb_ternary_tilelang.kernels import products, rows, votes
from arb_ternary_tilelang.lane import CUDA_TILES, INTRINSICS
from arb_ternary_tilelang.probe import cuda_compiler

needs_compiler = pytest.mark.skipif(
    cuda_compiler() is None, reason="no nvcc: kernels for CUDA cannot be compiled here"
)
needs_disassembler = pytest.mark.skipif(
    tool("nvdisasm") is None, reason="no nvdisasm: machine instructions cannot be read here"
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


@needs_compiler
@pytest.mark.parametrize(("name", "arch"), COMPILED)
def test_hot_kernel_spills_nothing_and_uses_its_units(name: str, arch: str) -> None:
    made = compile_kernel(HOT_KERNELS[name], arch)
    assert made.spills == 0
    assert 0 < made.registers <= 255
    if "M = 1" in name:
        assert made.instructions == ("dp4a.s32.s32",)
        return
    # The scores of the groups of trits are sums of four products as well.
    matrix = [each for each in made.instructions if "votes" not in name or each != "dp4a.s32.u32"]
    if "int8" in name:
        assert matrix
        assert all(instruction.startswith(INT8[arch]) for instruction in matrix)
        assert all("s32.s8.s8" in instruction for instruction in matrix)
    elif "bfloat16" in name:
        assert matrix
        assert all(instruction.startswith(HALF[arch]) for instruction in matrix)
        assert all("f32.bf16.bf16" in instruction for instruction in matrix)


# --- every option


def _fits(variant: Variant, arch: str) -> None:
    made = compile_kernel(variant, arch)
    assert made.spills == 0
    assert made.shared <= SHARED_LIMITS[arch]
    # A fused product and sum rounds once where the number format rounds twice.
    written = made.source.replace(INTRINSICS, "")
    assert "float32" in variant.options or "fma" not in written or "float32" in variant.name


_FLOAT32_VOTES = votes.Rule(votes.PRODUCT, votes.FACTORS, "float32", "int8", 8, True)
#: Kernels that could not be launched: they did not lower, had no target, or took too much memory.
ONCE_BROKEN = (
    (Variant(rows.quantize_gradient, ("float32",), sizes=()), "sm_90a"),
    (Variant(votes.cast, (_FLOAT32_VOTES, CUDA_TILES.votes)), "sm_80"),
    (
        Variant(products.product, (True, "float32", "float32", False, CUDA_TILES.many, 1)),
        "sm_120a",
    ),
)


@needs_compiler
@pytest.mark.parametrize(
    ("variant", "arch"), ONCE_BROKEN, ids=lambda value: getattr(value, "name", value)
)
def test_kernels_of_float32_fit_into_a_block(variant: Variant, arch: str) -> None:
    _fits(variant, arch)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_LIMITS)
@pytest.mark.parametrize("variant", covering(), ids=lambda variant: str(variant.name))
def test_kernel_with_every_option_fits_and_spills_nothing(variant: Variant, arch: str) -> None:
    _fits(variant, arch)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HOT_KERNELS if not name.startswith("quantize")])
def test_hot_kernel_for_sizes_that_fill_no_tile_spills_nothing(name: str) -> None:
    made = compile_kernel(HOT_KERNELS[name], "sm_80", {**ODD, "K": 320})
    assert made.spills == 0


@needs_compiler
@pytest.mark.parametrize(
    "arch", ["sm_120a", *(pytest.param(a, marks=pytest.mark.slow) for a in ("sm_103a", "sm_121a"))]
)
def test_product_compiles_for_the_newest_targets(arch: str) -> None:
    made = compile_kernel(HOT_KERNELS["linear int8"], arch)
    assert made.spills == 0


# --- counts of instructions


#: Counted on every run of the tests.
COUNTED_ALWAYS = ("linear int8, M = 1", "apply_votes")


@needs_compiler
@needs_disassembler
@pytest.mark.parametrize(
    "counted",
    [
        pytest.param(
            counted,
            id=counted.kernel,
            marks=() if counted.kernel in COUNTED_ALWAYS else pytest.mark.slow,
        )
        for counted in COUNTED
    ],
)
def test_kernel_takes_few_instructions(counted: Counted) -> None:
    assert counted.per_element("sm_90a") <= counted.most


@needs_compiler
@needs_disassembler
def test_votes_are_read_and_written_sixteen_at_a_time() -> None:
    code = code_of(compile_kernel(HOT_KERNELS["cast_votes int8"], "sm_90a"))
    # A thread has four words of 16 columns.
    assert code.count(r"\bLDG\.E\.128") == 4
    assert code.count(r"\bSTG\.E\.128") == 4
    assert code.count(r"\b(LDG|STG)\.E\.[US]8") == 0


LISTING = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/               @P1 BRA `(.L_x_1) ;
        /*0020*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_1:
        /*0030*/                   IMMA.16832.S8.S8 R0, R2, R3, R0 ;
        /*0040*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0060*/                   LDS R4, [R5] ;
        /*0070*/                   LDS R4, [R5+0x4] ;
        /*0080*/              @!P0 BRA `(.L_x_2) ;
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/                   BRA `(.L_x_3);
"""


def test_instructions_of_a_path_are_counted() -> None:
    code = parse(LISTING)
    assert len(code.instructions) == 10
    assert code.loop() == range(3, 6)
    # two instructions of the loop that multiplies, four rounds of three, the end
    assert code.epilogue(8) == 2 + 4 * 3 + 1
    # the addition is skipped, and each loop is taken once
    assert code.skipping() == 2 + 3 + 3 + 1
    assert code.count(r"\bLDS\b") == 2
