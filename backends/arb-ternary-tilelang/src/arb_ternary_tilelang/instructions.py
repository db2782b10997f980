"""Machine instructions of a compiled kernel, disassembled, and how many of them a path takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from attrs import field, frozen

_LABEL: Final = re.compile(r"^(\.L\S*):")
_INSTRUCTION: Final = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);")
_BRANCH: Final = re.compile(r"^(@\S+\s+)?BRA\S*\s.*`\((\.L\S+?)\)")
#: Instructions of the matrix units, and with them those that multiply four int8 at a time.
_MATRIX: Final = re.compile(r"IGMMA|HGMMA|QGMMA|IMMA|HMMA")
_MULTIPLY: Final = re.compile(_MATRIX.pattern + r"|IDP\.4A")
#: Steps after which a path has certainly entered a loop that it never leaves.
_MOST_STEPS: Final = 100_000


@frozen
class Branch:
    """A branch from one instruction to another; ``conditional`` if a predicate decides."""

    start: int
    to: int
    conditional: bool


@frozen
class Code:
    """Machine instructions.

    Attributes:
        instructions: instructions in the order of the code.
        branches: branches by the instruction at which they are.
    """

    instructions: tuple[str, ...]
    branches: dict[int, Branch] = field(repr=False)

    def count(self, pattern: str) -> int:
        """The number of instructions in which ``pattern`` is found."""
        return sum(1 for line in self.instructions if re.search(pattern, line))

    def main_loop(self) -> int:
        """Instructions of the smallest loop that multiplies.

        Raises:
            ValueError: no loop does.
        """
        sizes = [
            branch.start - branch.to + 1
            for branch in self.branches.values()
            if branch.to < branch.start and self._multiplies(branch.to, branch.start)
        ]
        if not sizes:
            raise ValueError("no loop of the kernel multiplies")
        return min(sizes)

    def epilogue(self, rows: int) -> int:
        """Instructions that a thread takes after its last product on the matrix units.

        Args:
            rows: rows of a tile. A loop over them reads each from shared memory once.
        """
        last = max(i for i, line in enumerate(self.instructions) if _MATRIX.search(line))
        taken = 0
        for position in self._path(last + 1):
            taken += 1
            branch = self.branches.get(position)
            if branch is not None and branch.conditional and branch.to < position:
                body = self.instructions[branch.to : position + 1]
                reads = sum(1 for line in body if re.search(r"\bLDS\b", line))
                if reads:
                    taken += (rows // reads - 1) * len(body)
        return taken

    def shortest(self) -> int:
        """Instructions from the beginning to the end where every condition skips its code."""
        return sum(1 for _ in self._path(0))

    def _multiplies(self, first: int, last: int) -> bool:
        return any(_MULTIPLY.search(line) for line in self.instructions[first : last + 1])

    def _path(self, first: int) -> Iterator[int]:
        """Positions to the end: conditional branches are taken forwards and not backwards."""
        position = first
        for _ in range(_MOST_STEPS):
            yield position
            if re.match(r"EXIT\b", self.instructions[position]):
                return
            branch = self.branches.get(position)
            position += 1
            if branch is not None and (not branch.conditional or branch.to >= position):
                position = branch.to
        raise ValueError("the path does not end")


def parse(text: str) -> Code:
    """Read what ``nvdisasm -c`` prints."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label = _LABEL.match(line)
        if label:
            labels[label[1]] = len(instructions)
        found = _INSTRUCTION.match(line)
        if found:
            instructions.append(found[1].strip())
    branches = {}
    for position, line in enumerate(instructions):
        found = _BRANCH.match(line)
        if found and found[2] in labels:
            branches[position] = Branch(position, labels[found[2]], found[1] is not None)
    return Code(tuple(instructions), branches)
