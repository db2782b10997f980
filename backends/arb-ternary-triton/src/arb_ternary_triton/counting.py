"""Count the instructions that a compiled kernel spends on a weight.

The count is of the machine code: SASS for NVIDIA's GPUs, amdgcn for AMD's. A kernel that sums has
one large loop, whose instructions are divided by the weights that a thread decodes in one turn.
Of a kernel that casts votes, it is the shortest way to that loop and from it to the end, divided by
the elements of the tile that a thread has; so is the shortest way through a kernel that flips. That
is the way of a tile without NaN, whose shifts are in their usual range, and where no accumulator
crosses its threshold. It is a model of where time goes, not a measurement.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import triton
from attrs import frozen

from arb_ternary_triton.arguments import BLOCK, LANES
from arb_ternary_triton.launch import Launch

_SASS_LABEL: Final = re.compile(r"^(\.L\S*):")
_SASS_LINE: Final = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_SASS_JUMP: Final = re.compile(r"^(@\S+ )?BRA\b.*`\((\.L\S+?)\)")
_MATRIX: Final = re.compile(r"MMA|v_mfma|v_wmma")
_AMD_LABEL: Final = re.compile(r"^(\.LBB\d+_\d+):")
_AMD_LINE: Final = re.compile(r"^\t([a-z][a-z0-9_]+\b.*)")
_AMD_JUMP: Final = re.compile(r"^s_(c?)branch\S*\s+(\.LBB\d+_\d+)")
#: The last instruction, perhaps of some threads only.
_END: Final = re.compile(r"^(@\S+ )?EXIT\b|^s_endpgm")


def sass_of(cubin: bytes) -> str:
    """Return the machine code of a cubin as text."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@frozen
class Jump:
    """A jump to the instruction at ``target``; ``conditional`` if code decides whether."""

    target: int
    conditional: bool


@frozen
class Code:
    """A kernel's instructions, and its jumps by the place of the instruction that jumps.

    The endless loop and the padding behind the end of a kernel are left out.
    """

    instructions: list[str]
    jumps: dict[int, Jump]

    def loop(self) -> range:
        """Return the places of the loop that sums, none if there is no loop.

        That is the shortest loop with a matrix instruction, or the longest of all if there is none.
        """
        loops = [
            range(jump.target, place + 1)
            for place, jump in self.jumps.items()
            if jump.target < place
        ]
        with_matrix = [turn for turn in loops if self._multiplies(turn)]
        if with_matrix:
            return min(with_matrix, key=len)
        return max(loops, key=len, default=range(0))

    def _multiplies(self, places: range) -> bool:
        return any(_MATRIX.search(self.instructions[place]) for place in places)

    def shortest(self, start: int = 0, end: int | None = None) -> int:
        """Return the instructions of the shortest way to ``end``, or to the end of the kernel.

        The instruction at ``end`` is not counted, that at the end of the kernel is.
        """
        reached = {start}
        steps = 0
        while end not in reached:
            following: set[int] = set()
            for place in reached:
                if end is None and _END.search(self.instructions[place]):
                    return steps + 1
                jump = self.jumps.get(place)
                if "execz" in self.instructions[place]:
                    jump = None  # taken if no thread has work
                if jump is not None:
                    following.add(jump.target)
                if (jump is None or jump.conditional) and place + 1 < len(self.instructions):
                    following.add(place + 1)
            reached = following
            steps += 1
        return steps


def parse(text: str, *, nvidia: bool) -> Code:
    """Read machine code as text."""
    label, line, jump = (
        (_SASS_LABEL, _SASS_LINE, _SASS_JUMP) if nvidia else (_AMD_LABEL, _AMD_LINE, _AMD_JUMP)
    )
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for each in text.splitlines():
        if found := label.match(each):
            labels[found[1]] = len(instructions)
            continue
        found = line.match(each)
        if found and found[1] != "NOP":
            instructions.append(found[1])
    jumps = {}
    for place, instruction in enumerate(instructions):
        found = jump.match(instruction)
        if found:
            jumps[place] = Jump(labels[found[2]], conditional=bool(found[1]))
    last = len(instructions) - 1
    if last in jumps and jumps[last].target == last:
        del instructions[last], jumps[last]
    return Code(instructions, jumps)


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
    code = parse(text, nvidia=nvidia)
    loop = code.loop()
    counted = len(loop)
    if kernel == "product_votes_kernel":
        counted = code.shortest(0, loop.start) + code.shortest(loop.stop)
    elif kernel == "flip_kernel":
        counted = code.shortest()
    threads = launch.warps * built.metadata.target.warp_size
    return float(counted * threads / elements())
