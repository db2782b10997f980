"""Compile kernels for a GPU and read their registers, spills, shared memory and instructions.

``python -m arb_ternary_tilelang.compiled`` prints the table of the documentation for the hot
kernels. It needs nvcc, but no GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from attrs import frozen

from arb_ternary.errors import EnvironmentProblem
from arb_ternary_tilelang.kernels import flips, products, rows, votes
from arb_ternary_tilelang.lane import CUDA_FLAGS, Lane, cuda_lane
from arb_ternary_tilelang.probe import cuda_compiler

#: Targets that the documentation lists.
ARCHITECTURES: Final = ("sm_80", "sm_90a")
#: A weight of a layer of 4096 by 4096 with an exponent for 128 columns.
_LAYER: Final = {"N": 4096, "K": 4096, "G": 128}
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
    """

    registers: int
    spill_stores: int
    spill_loads: int
    shared: int
    threads: int
    instructions: tuple[str, ...]


def _vote_kernel(kind: int, grad: str, x: str, lane: Lane) -> Any:
    rule = votes.Rule(
        source=votes.PRODUCT,
        kind=kind,
        grad=grad,
        x=x,
        bits=8,
        learns=True,
    )
    return votes.cast(lane, rule, lane.vote_tiles, **_LAYER)


def _product(turned: bool, mode: str, out: str, few: bool, lane: Lane) -> Any:
    if few:
        tiles = lane.few_tiles
        splits = 4
    else:
        tiles = lane.tiles
        splits = 1
    return products.product(lane, turned, mode, out, False, tiles, splits, **_LAYER)


#: Descriptions of the kernels that a training step spends its time in, by name.
HOT_KERNELS: Final[Mapping[str, Callable[[Lane], Any]]] = MappingProxyType(
    {
        "linear int8, M = 1": lambda lane: products.gemv(lane, "bfloat16", False, 4, **_LAYER),
        "linear int8, M <= 64": partial(_product, False, products.SUMS, "int32", True),
        "linear int8": partial(_product, False, "int8", "bfloat16", False),
        "linear bfloat16": partial(_product, False, "bfloat16", "bfloat16", False),
        "linear_grad_input int8": partial(_product, True, "int8", "bfloat16", False),
        "linear_grad_input bfloat16": partial(_product, True, "bfloat16", "bfloat16", False),
        "cast_votes int8": partial(_vote_kernel, votes.SIGN, "int8", "int8"),
        "cast_scaled_votes int8, shifts": partial(_vote_kernel, votes.SHIFTS, "int8", "int8"),
        "cast_scaled_votes bfloat16": partial(_vote_kernel, votes.FACTORS, "bfloat16", "int8"),
        "apply_scaled_votes": lambda lane: flips.flip_trits(lane, 8, True, True, N=4096, K=4096),
        "quantize_rows": lambda lane: rows.quantize_rows(lane, "bfloat16", False, K=4096),
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


def _described(name: str, arch: str) -> tuple[str, int]:
    lane = cuda_lane(arch)
    return _lowered(lane, HOT_KERNELS[name](lane))


def compile_kernel(name: str, arch: str) -> Compiled:
    """Compile one of :data:`HOT_KERNELS` for ``arch`` with nvcc and read its report.

    Raises:
        KeyError: there is no such kernel.
        EnvironmentProblem: there is no nvcc, or it refuses.
    """
    import tilelang

    compiler = cuda_compiler()
    if compiler is None:
        raise EnvironmentProblem(
            "kernels for CUDA are compiled by nvcc: none was found", "install the CUDA toolkit"
        )
    source, dynamic = _described(name, arch)
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
                f"{compiler} refuses the kernel {name!r} for {arch}", done.stderr.strip()[-400:]
            )
        assembly = (Path(folder) / "kernel.ptx").read_text()
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
    )


def table(architectures: tuple[str, ...] = ARCHITECTURES) -> str:
    """Return a table in Markdown of every hot kernel on every architecture."""
    lines = [
        "| kernel | target | registers | spilled bytes | shared memory | threads | matrix "
        "instruction |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in HOT_KERNELS:
        for arch in architectures:
            made = compile_kernel(name, arch)
            spilled = made.spill_stores + made.spill_loads
            instructions = ", ".join(f"`{instruction}`" for instruction in made.instructions)
            if not instructions:
                instructions = "none"
            lines.append(
                f"| {name} | {arch} | {made.registers} | {spilled} | {made.shared} | "
                f"{made.threads} | {instructions} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    sys.stdout.write(table() + "\n")


if __name__ == "__main__":
    main()
