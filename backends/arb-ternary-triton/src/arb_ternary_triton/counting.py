"""Count the instructions that a compiled kernel spends on a weight.

The count is of the machine code: SASS for NVIDIA's GPUs, amdgcn for AMD's. A kernel that sums has
one large loop, whose instructions are divided by the weights that a thread decodes in one turn. The
rest of a kernel that casts votes, and all of a kernel that flips, is divided by the elements of the
tile that a thread has. It is a model of where time goes, not a measurement.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import triton

from arb_ternary_triton.arguments import BLOCK, LANES
from arb_ternary_triton.launch import Launch

_SASS_LABEL: Final = re.compile(r"^(\.L\S*):")
_SASS_LINE: Final = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_SASS_JUMP: Final = re.compile(r"\bBRA\b.*`\((\.L\S+?)\)")
_MATRIX: Final = re.compile(r"MMA|v_mfma|v_wmma")
_AMD_LABEL: Final = re.compile(r"^(\.LBB\d+_\d+):")
_AMD_LINE: Final = re.compile(r"^\t([a-z][a-z0-9_]+\b.*)")
_AMD_JUMP: Final = re.compile(r"^s_c?branch\S*\s+(\.LBB\d+_\d+)")


def sass_of(cubin: bytes) -> str:
    """Return the machine code of a cubin as text."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def code_and_loop(text: str, *, nvidia: bool) -> tuple[list[str], list[str]]:
    """Return a kernel's instructions, and those of the loop that sums.

    That is the shortest loop with a matrix instruction, or the longest of all if there is none. The
    endless loop and the padding behind the end of a kernel do not count.
    """
    label, line, jump = (
        (_SASS_LABEL, _SASS_LINE, _SASS_JUMP) if nvidia else (_AMD_LABEL, _AMD_LINE, _AMD_JUMP)
    )
    code: list[str] = []
    labels: dict[str, int] = {}
    loops: list[list[str]] = []
    for each in text.splitlines():
        if found := label.match(each):
            labels[found[1]] = len(code)
            continue
        found = line.match(each)
        if found is None or found[1] == "NOP":
            continue
        code.append(found[1])
        target = jump.search(found[1])
        if target and target[1] in labels:
            turn = code[labels[target[1]] :]
            if len(turn) == 1:
                code.pop()
            else:
                loops.append(turn)
    with_matrix = [turn for turn in loops if any(_MATRIX.search(each) for each in turn)]
    if with_matrix:
        return code, min(with_matrix, key=len)
    return code, max(loops, key=len, default=[])


def per_element(launch: Launch, built: Any) -> float | None:
    """Return the instructions per weight of a product, or per element of a kernel of votes.

    Args:
        launch: the recorded launch of the kernel.
        built: the kernel as Triton compiled it.

    Returns:
        None for a kernel for which no count is defined.
    """
    sizes = launch.constants
    kernel = launch.kernel.__name__
    elements = {
        "row_kernel": lambda: sizes["OUTPUTS"] * sizes["BLOCKS"] * BLOCK,
        "linear_kernel": lambda: sizes["OUTPUTS"] * sizes["BLOCKS"] * BLOCK,
        "grad_input_kernel": lambda: sizes["OUTPUTS"] * sizes["BLOCKS"] * LANES,
        "product_votes_kernel": lambda: sizes["ROWS"] * sizes["COLUMNS"],
        "flip_kernel": lambda: sizes["ROWS"] * sizes["COLUMNS"],
    }.get(kernel)
    if elements is None:
        return None
    nvidia = "cubin" in built.asm
    text = sass_of(built.asm["cubin"]) if nvidia else built.asm["amdgcn"]
    code, loop = code_and_loop(text, nvidia=nvidia)
    counted = len(loop)
    if kernel == "product_votes_kernel":
        counted = len(code) - len(loop)
    elif kernel == "flip_kernel":
        counted = len(code)
    threads = launch.warps * built.metadata.target.warp_size
    return float(counted * threads / elements())
