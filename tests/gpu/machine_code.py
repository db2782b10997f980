"""Read machine code of GPU kernels: what a kernel uses, and how many instructions a way takes.

SASS of NVIDIA's GPUs is read from the listing of nvdisasm, amdgcn of AMD's from what Triton's
compiler returns. Counts describe compiled code: they are a model of where time goes, and measure
nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from attrs import field, frozen

_LABEL: Final = re.compile(r"^(\.L\S*):")
_LINE: Final = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;|^\t([a-z][a-z0-9_]+\b.*)")
_JUMP: Final = re.compile(r"^(@\S+\s+)?BRA\b.*`\((\.L\S+?)\)|^s_(c?)branch\S*\s+(\.L\S+)")
#: Instructions of the matrix units, and with them those that multiply four int8 at a time.
_MATRIX: Final = re.compile(r"MMA|v_mfma|v_wmma")
_MULTIPLY: Final = re.compile(_MATRIX.pattern + r"|IDP\.4A")
#: The last instruction, perhaps of some threads only.
_END: Final = re.compile(r"^(@\S+\s+)?EXIT\b|^s_endpgm")
#: Instructions after which a way has certainly entered a loop that it never leaves.
_LONGEST_WAY: Final = 100_000
#: Matrix instructions and dot products of four int8, as PTX and amdgcn spell them.
_ARITHMETIC: Final = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.\w+\.\w+\.\w+\.\w+|mma\.sync\.aligned\.m\w+(?:\.row\.col)?[.\w]*"
    r"|tcgen05\.mma[.:\w]*|dp4a\.\w+\.\w+|v_w?mf?ma_\w+"
)


@frozen
class Compiled:
    """A compiled kernel.

    Attributes:
        case: name of the case.
        target: the GPU.
        kernel: the function's name.
        threads: threads per block, producers of copies included.
        registers: registers per thread.
        spills: bytes of registers kept in memory for lack of space (on AMD's GPUs: registers).
        shared: bytes of shared memory per block.
        instructions: distinct matrix and dot-product instructions in the assembly, sorted.
        per_element: instructions per weight or element; None if none are counted.
        source: CUDA source, of a kernel that was made from some.
        binary: cubin of a kernel whose code is read later.
    """

    case: str
    target: str
    kernel: str
    threads: int
    registers: int
    spills: int
    shared: int
    instructions: tuple[str, ...]
    per_element: float | None = None
    source: str = field(default="", repr=False)
    binary: bytes = field(default=b"", repr=False)


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
    jumps: dict[int, Jump] = field(repr=False)

    def count(self, pattern: str) -> int:
        """Return the number of instructions in which ``pattern`` is found."""
        return sum(1 for line in self.instructions if re.search(pattern, line))

    def loop(self) -> range:
        """Return the places of the loop that sums, none if there is no loop.

        That is the shortest loop that multiplies, or the longest of all if none does.
        """
        loops = [
            range(jump.target, place + 1)
            for place, jump in self.jumps.items()
            if jump.target < place
        ]
        multiplying = [turn for turn in loops if self._multiplies(turn)]
        if multiplying:
            return min(multiplying, key=len)
        return max(loops, key=len, default=range(0))

    def _multiplies(self, places: range) -> bool:
        return any(_MULTIPLY.search(self.instructions[place]) for place in places)

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

    def skipping(self) -> int:
        """Return the instructions to the end if every condition skips its code."""
        return sum(1 for _ in self._skipping_way(0))

    def epilogue(self, rows: int) -> int:
        """Return the instructions that a thread takes after its last product on the matrix units.

        Args:
            rows: rows of a tile. A loop over them reads each from shared memory once.
        """
        last = max(i for i, line in enumerate(self.instructions) if _MATRIX.search(line))
        taken = 0
        for place in self._skipping_way(last + 1):
            taken += 1
            jump = self.jumps.get(place)
            if jump is not None and jump.conditional and jump.target < place:
                body = self.instructions[jump.target : place + 1]
                reads = sum(1 for line in body if re.search(r"\bLDS\b", line))
                if reads:
                    taken += (rows // reads - 1) * len(body)
        return taken

    def _skipping_way(self, place: int) -> Iterator[int]:
        """Yield places to the end: conditional jumps are taken forwards and not backwards."""
        for _ in range(_LONGEST_WAY):
            yield place
            if re.match(r"EXIT\b", self.instructions[place]):
                return
            jump = self.jumps.get(place)
            place += 1
            if jump is not None and (not jump.conditional or jump.target >= place):
                place = jump.target
        raise ValueError("the way does not end")


def parse(text: str) -> Code:
    """Read SASS or amdgcn as text."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for each in text.splitlines():
        label = _LABEL.match(each)
        if label:
            labels[label[1]] = len(instructions)
            continue
        line = _LINE.match(each)
        instruction = line and (line[1] or line[2])
        if instruction and instruction != "NOP":
            instructions.append(instruction)
    jumps = {}
    for place, instruction in enumerate(instructions):
        found = _JUMP.match(instruction)
        if found:
            target = labels[found[2] or found[4]]
            jumps[place] = Jump(target, conditional=bool(found[1] or found[3]))
    last = len(instructions) - 1
    if last in jumps and jumps[last].target == last:
        del instructions[last], jumps[last]
    return Code(instructions, jumps)


@cache
def tool(name: str) -> str | None:
    """Return the path of a program: the one that comes with Triton, or from the CUDA toolkit."""
    spec = find_spec("triton")
    if spec is not None and spec.origin is not None:
        found = shutil.which(name, path=str(Path(spec.origin).parent / "backends/nvidia/bin"))
        if found is not None:
            return found
    return shutil.which(name)


def _told(program: str, option: str, cubin: bytes) -> str:
    """Return what a program prints about a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool(program) or program, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def disassemble(cubin: bytes) -> str:
    """Return the machine code of a cubin as text."""
    return _told("nvdisasm", "-c", cubin)


def nvidia_registers(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of stack per thread.

    The kernels have no arrays of their own, so the stack holds only spilled registers.
    """
    report = _told("cuobjdump", "-res-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump does not say what a kernel uses: {report}")
    return int(found[1]), int(found[2])


def amd_registers(text: str) -> tuple[int, int]:
    """Return registers and spilled registers per thread of amdgcn."""
    counts = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text))
    return int(counts["vgpr_count"]), int(counts["vgpr_spill_count"])


def matrix_instructions(assembly: str) -> tuple[str, ...]:
    """Return the distinct matrix and dot-product instructions of PTX or amdgcn, sorted."""
    return tuple(sorted(set(_ARITHMETIC.findall(assembly))))


def table(titles: str, rows: list[list[object]]) -> str:
    """Return a table in Markdown; ``titles`` are separated by bars."""
    columns = titles.count("|") + 1
    lines = [f"| {titles} |", "|" + "---|" * columns]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)
