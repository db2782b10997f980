"""Compile kernels for a GPU and read their registers, spills, shared memory and instructions.

``python -m arb_ternary_tilelang.compiled`` prints the table of the documentation for the hot
kernels, ``python -m arb_ternary_tilelang.compiled counts`` how many instructions they take. Both
need nvcc, the second also nvdisasm, and neither a GPU: they describe compiled code and measure
nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from attrs import field, frozen

from arb_ternary.errors import EnvironmentProblem
from arb_ternary_tilelang.instructions import Code, parse
from arb_ternary_tilelang.kernels import flips, products, rows, votes
from arb_ternary_tilelang.kernels.bits import UNIT
from arb_ternary_tilelang.lane import CUDA_FLAGS, CUDA_TILES, Lane, Tiles, cuda_lane
from arb_ternary_tilelang.probe import cuda_compiler
from arb_ternary_tilelang.variants import LAYER, Variant

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
_SEARCH: Final = {
    "registers": r"Used (\d+) registers",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
}
#: Matrix instructions and dot products of four int8, as PTX spells them.
_INSTRUCTIONS: Final = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.\w+\.\w+\.\w+\.\w+|mma\.sync\.aligned\.\w+\.row\.col\.[\w.]+|dp4a\.\w+\.\w+"
)


@frozen
class Compiled:
    """A kernel compiled for an architecture.

    Attributes:
        registers: registers of a thread.
        spill_stores: bytes of registers that a thread stores to memory.
        spill_loads: bytes that it loads back.
        shared: bytes of a block's shared memory.
        threads: threads of a block, producers of copies included.
        instructions: distinct matrix instructions in the assembly, sorted.
        source: the CUDA source.
        binary: the cubin.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    shared: int
    threads: int
    instructions: tuple[str, ...]
    source: str = field(repr=False)
    binary: bytes = field(repr=False)


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


def disassembler() -> str | None:
    """Return the path of nvdisasm: from the CUDA toolkit, or the one that comes with Triton."""
    found = shutil.which("nvdisasm")
    compiler = cuda_compiler()
    if found is None and compiler is not None:
        found = shutil.which(str(Path(compiler).resolve().with_name("nvdisasm")))
    spec = find_spec("triton")
    if found is None and spec is not None and spec.origin is not None:
        place = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        found = shutil.which(str(place))
    return found


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
    numbers = {}
    for key, pattern in _SEARCH.items():
        found = re.search(pattern, report)
        if found:
            numbers[key] = int(found.group(1))
    static = re.search(r"(\d+) bytes smem", report)
    threads = re.search(r"__launch_bounds__\((\d+)", source)
    instructions = set(_INSTRUCTIONS.findall(assembly))
    return Compiled(
        **numbers,
        shared=dynamic + (int(static.group(1)) if static else 0),
        threads=int(threads.group(1)) if threads else 0,
        instructions=tuple(sorted(instructions)),
        source=source,
        binary=binary,
    )


def disassembled(compiled: Compiled) -> Code:
    """Disassemble a kernel.

    Raises:
        EnvironmentProblem: there is no nvdisasm.
    """
    program = disassembler()
    if program is None:
        raise EnvironmentProblem(
            "machine instructions are read by nvdisasm: none was found",
            "install the CUDA toolkit, or triton",
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.binary)
        file.flush()
        done = subprocess.run(
            [program, "-c", file.name], capture_output=True, text=True, check=True
        )
    return parse(done.stdout)


@frozen
class Counted:
    """A part of a kernel whose instructions are counted.

    Attributes:
        kernel: its name in :data:`HOT_KERNELS`.
        part: what is counted, in words.
        each: weights or elements of a thread in that part.
        count: counts the instructions of the part.
        gate: the most instructions per weight.
        weight: sizes of the weight.
    """

    kernel: str
    part: str
    each: int
    count: Callable[[Code], int]
    gate: float
    weight: Mapping[str, int] = LAYER

    def per_element(self, arch: str) -> float:
        """Instructions per weight or element on a target."""
        made = compile_kernel(HOT_KERNELS[self.kernel], arch, self.weight)
        return self.count(disassembled(made)) / self.each


def _product_part(kernel: str, tiles: Tiles, gate: float) -> Counted:
    """A step of a product: the weights that a thread decodes in it, and their multiplication.

    The sum is long, so that the loop over its steps is not written out.
    """
    return Counted(
        kernel=kernel,
        part="main loop, per weight",
        each=tiles.columns * tiles.depth // tiles.threads,
        count=Code.main_loop,
        gate=gate,
        weight={"N": 16384, "K": 16384, "G": 128},
    )


def _vote_part(kernel: str) -> Counted:
    tiles = CUDA_TILES.votes
    return Counted(
        kernel=kernel,
        part="after the product, per element",
        each=tiles.rows * tiles.columns // tiles.threads,
        count=lambda code: code.epilogue(tiles.rows),
        gate=35,
    )


def _flip_part(kernel: str) -> Counted:
    return Counted(
        kernel=kernel,
        part="where nothing crosses, per element",
        each=UNIT,
        count=Code.shortest,
        gate=15,
    )


#: What is counted on sm_90a. Four rows of 64 columns are a step of the product with few rows.
COUNTED: Final = (
    Counted("linear int8, M = 1", "main loop, per weight", 4 * 64, Code.main_loop, 1.1),
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


def table(architectures: tuple[str, ...] = ARCHITECTURES) -> str:
    """Return a table in Markdown of every hot kernel on every architecture."""
    lines = [
        "| kernel | target | registers | spilled bytes | shared memory | threads | matrix "
        "instruction |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, variant in HOT_KERNELS.items():
        for arch in architectures:
            made = compile_kernel(variant, arch)
            spilled = made.spill_stores + made.spill_loads
            instructions = ", ".join(f"`{instruction}`" for instruction in made.instructions)
            if not instructions:
                instructions = "none"
            lines.append(
                f"| {name} | {arch} | {made.registers} | {spilled} | {made.shared} | "
                f"{made.threads} | {instructions} |"
            )
    return "\n".join(lines)


def counts() -> str:
    """Return a table in Markdown of the instructions that kernels take on sm_90a."""
    lines = ["| kernel | counted | instructions | at most |", "|---|---|---:|---:|"]
    for counted in COUNTED:
        found = counted.per_element("sm_90a")
        lines.append(f"| {counted.kernel} | {counted.part} | {found:.2f} | {counted.gate:g} |")
    return "\n".join(lines)


def main() -> None:
    """Print a table."""
    made = counts() if sys.argv[1:] == ["counts"] else table()
    sys.stdout.write(made + "\n")


if __name__ == "__main__":
    main()
