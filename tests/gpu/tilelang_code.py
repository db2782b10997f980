"""Compile kernels for a GPU and read their registers, spills, shared memory and instructions.

``python tests/gpu/tilelang_code.py`` prints the table of the report for the hot kernels, with
``--counts`` how many instructions they take. Both need nvcc, the second also nvdisasm, and neither
a GPU: they describe compiled code and measure nothing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from attrs import frozen
from machine_code import Code, Compiled, disassemble, matrix_instructions, parse, table
from tilelang_variants import LAYER, Variant

from arb_ternary.errors import EnvironmentProblem
from arb_ternary_tilelang.kernels import flips, products, rows, votes
from arb_ternary_tilelang.kernels.bits import UNIT
from arb_ternary_tilelang.lane import CUDA_FLAGS, CUDA_TILES, Lane, Tiles, cuda_lane
from arb_ternary_tilelang.probe import cuda_compiler

#: Targets that the documentation lists.
ARCHITECTURES: Final = ("sm_80", "sm_90a")
_KIB: Final = 1024
#: Bytes of shared memory that a block may ask for, by target.
SHARED_LIMITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "sm_80": 163 * _KIB,
        "sm_86": 99 * _KIB,
        "sm_89": 99 * _KIB,
        "sm_90a": 227 * _KIB,
        "sm_100a": 227 * _KIB,
        "sm_120a": 99 * _KIB,
    }
)


def _product(turned: bool, mode: str, out: str, few: bool) -> Variant:
    tiles = CUDA_TILES.few if few else CUDA_TILES.many
    splits = 4 if mode == products.SUMS else 1
    return Variant(products.product, (turned, mode, out, False, tiles, splits))


def _votes(kind: int, grad: str) -> Variant:
    rule = votes.Rule(votes.PRODUCT, kind, grad, "int8", 8, True)
    return Variant(votes.cast, (rule, CUDA_TILES.votes))


#: The kernels that a training step spends its time in, by name.
HOT_KERNELS: Final[Mapping[str, Variant]] = MappingProxyType(
    {
        "linear int8, M = 1": Variant(products.gemv, ("bfloat16", False, 4)),
        "linear int8, M <= 64": _product(False, products.SUMS, "int32", True),
        "linear int8": _product(False, "int8", "bfloat16", False),
        "linear bfloat16": _product(False, "bfloat16", "bfloat16", False),
        "linear_grad_input int8": _product(True, "int8", "bfloat16", False),
        "linear_grad_input bfloat16": _product(True, "bfloat16", "bfloat16", False),
        "cast_votes int8": _votes(votes.SIGN, "int8"),
        "cast_scaled_votes int8, factors": _votes(votes.FACTORS, "int8"),
        "cast_scaled_votes int8, shifts": _votes(votes.SHIFTS, "int8"),
        "cast_scaled_votes bfloat16": _votes(votes.FACTORS, "bfloat16"),
        "apply_votes": Variant(flips.flip_trits, (8, False, False), sizes=("N", "K")),
        "apply_scaled_votes": Variant(flips.flip_trits, (8, True, True), sizes=("N", "K")),
        "quantize_rows": Variant(rows.quantize_rows, ("bfloat16", False), sizes=("K",)),
    }
)


def _lowered(lane: Lane, program: Any) -> tuple[str, int]:
    """Return CUDA source, and the bytes of shared memory that a launch asks for."""
    import tilelang
    from tvm.target import Target

    target = Target(lane.target)
    with tilelang.transform.PassContext(opt_level=3), target:
        artifact = tilelang.lower(program, target=target, enable_device_compile=False)
    (function,) = artifact.device_mod.functions.values()
    attributes = function.attrs
    shared = 0
    if "dyn_shared_memory_buf" in attributes:
        shared = int(attributes["dyn_shared_memory_buf"])
    return str(artifact.kernel_source), shared


def compile_kernel(variant: Variant, arch: str, weight: Mapping[str, int] = LAYER) -> Compiled:
    """Compile a kernel for ``arch`` with nvcc and read its report.

    Raises:
        EnvironmentProblem: there is no nvcc, or it refuses.
    """
    import tilelang

    compiler = cuda_compiler()
    if compiler is None:
        raise EnvironmentProblem(
            "kernels for CUDA are compiled by nvcc: none was found", "install the CUDA toolkit"
        )
    lane = cuda_lane(arch)
    source, dynamic = _lowered(lane, variant.program(lane, weight))
    number = arch.removeprefix("sm_")
    home = Path(tilelang.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cu"
        path.write_text(source)
        command = [
            compiler,
            "-std=c++20",
            f"-gencode=arch=compute_{number},code=sm_{number}",
            "-O3",
            "-DENABLE_BF16",
            *CUDA_FLAGS,
            "-w",
            f"-I{home / 'src'}",
            f"-I{home / '3rdparty' / 'cutlass' / 'include'}",
            "-cubin",
            "-Xptxas",
            "-v",
            "--keep",
            f"--keep-dir={folder}",
            "-o",
            f"{folder}/kernel.cubin",
            str(path),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EnvironmentProblem(
                f"{compiler} refuses the kernel {variant.name!r} for {arch}",
                done.stderr.strip()[-400:],
            )
        assembly = (Path(folder) / "kernel.ptx").read_text()
        binary = (Path(folder) / "kernel.cubin").read_bytes()
    report = done.stdout + done.stderr
    threads = re.search(r"__launch_bounds__\((\d+)", source)
    return Compiled(
        case=variant.name,
        target=arch,
        kernel=variant.make.__name__,
        threads=int(threads[1]) if threads else 0,
        registers=_number(r"Used (\d+) registers", report),
        spills=_number(r"(\d+) bytes spill stores", report)
        + _number(r"(\d+) bytes spill loads", report),
        shared=dynamic + _number(r"(\d+) bytes smem", report, default=0),
        instructions=matrix_instructions(assembly),
        source=source,
        binary=binary,
    )


def _number(pattern: str, report: str, default: int | None = None) -> int:
    """Return a number in ptxas' report."""
    found = re.search(pattern, report)
    if found is not None:
        return int(found[1])
    if default is None:
        raise RuntimeError(f"ptxas does not say what a kernel uses: {report}")
    return default


def code_of(compiled: Compiled) -> Code:
    """Disassemble a kernel."""
    return parse(disassemble(compiled.binary))


@frozen
class Counted:
    """A part of a kernel whose instructions are counted.

    Attributes:
        kernel: its name in :data:`HOT_KERNELS`.
        part: what is counted, in words.
        each: weights or elements of a thread in that part.
        count: counts the instructions of the part.
        most: the most instructions per weight.
        weight: sizes of the weight.
    """

    kernel: str
    part: str
    each: int
    count: Callable[[Code], int]
    most: float
    weight: Mapping[str, int] = LAYER

    def per_element(self, arch: str) -> float:
        """Instructions per weight or element on a target."""
        made = compile_kernel(HOT_KERNELS[self.kernel], arch, self.weight)
        return self.count(code_of(made)) / self.each


def _main_loop(code: Code) -> int:
    return len(code.loop())


def _product_part(kernel: str, tiles: Tiles, most: float) -> Counted:
    """A step of a product: the weights that a thread decodes in it, and their multiplication.

    The sum is long, so that the loop over its steps is not written out.
    """
    return Counted(
        kernel=kernel,
        part="main loop, per weight",
        each=tiles.columns * tiles.depth // tiles.threads,
        count=_main_loop,
        most=most,
        weight={"N": 16384, "K": 16384, "G": 128},
    )


def _vote_part(kernel: str) -> Counted:
    tiles = CUDA_TILES.votes
    return Counted(
        kernel=kernel,
        part="after the product, per element",
        each=tiles.rows * tiles.columns // tiles.threads,
        count=lambda code: code.epilogue(tiles.rows),
        most=35,
    )


def _flip_part(kernel: str) -> Counted:
    return Counted(
        kernel=kernel,
        part="where nothing crosses, per element",
        each=UNIT,
        count=Code.skipping,
        most=15,
    )


#: What is counted on sm_90a. Four rows of 64 columns are a step of the product with few rows.
COUNTED: Final = (
    Counted("linear int8, M = 1", "main loop, per weight", 4 * 64, _main_loop, 1.1),
    _product_part("linear int8, M <= 64", CUDA_TILES.few, 2.0),
    _product_part("linear int8", CUDA_TILES.many, 2.7),
    _product_part("linear_grad_input int8", CUDA_TILES.many, 3.5),
    _vote_part("cast_votes int8"),
    _vote_part("cast_scaled_votes int8, factors"),
    _vote_part("cast_scaled_votes int8, shifts"),
    _vote_part("cast_scaled_votes bfloat16"),
    _flip_part("apply_votes"),
    _flip_part("apply_scaled_votes"),
)


def main() -> None:
    """Print a table of every hot kernel, or of the instructions that kernels take on sm_90a."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", action="store_true", help="count machine instructions")
    rows: list[list[object]] = []
    if parser.parse_args().counts:
        for counted in COUNTED:
            found = f"{counted.per_element('sm_90a'):.2f}"
            rows.append([counted.kernel, counted.part, found, f"{counted.most:g}"])
        print(table("kernel | counted | instructions | at most", rows))
        return
    for name, variant in HOT_KERNELS.items():
        for arch in ARCHITECTURES:
            one = compile_kernel(variant, arch)
            names = ", ".join(f"`{instruction}`" for instruction in one.instructions) or "none"
            memory = (one.registers, one.spills, one.shared, one.threads)
            rows.append([name, arch, *memory, names])
    titles = "kernel | target | registers | spilled bytes | shared memory | threads"
    print(table(f"{titles} | matrix instruction", rows))


if __name__ == "__main__":
    main()
