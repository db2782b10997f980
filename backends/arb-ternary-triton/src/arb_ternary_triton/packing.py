"""Check that instructions which return four bytes return four neighbouring ones.

Some instructions of the products take a word of codes and return four bytes at once. Triton gives
such an instruction four elements of a thread, in the order of the thread's registers, whatever
their places in the tensor are. The kernels are right only if these are the four elements of the
last axis. That holds for the shipped tiles with the releases of Triton that the tests compile with;
here it is checked in what Triton made of a kernel, so that another release or tile is refused
instead of computing something else.
"""

from __future__ import annotations

import re
from typing import Final

_ALIAS: Final = re.compile(r"^(#\w+) = (.*)$", re.MULTILINE)
_FOUR: Final = re.compile(
    r"elementwise_inline_asm [^\n]*packed_element = 4 [^\n]*-> tensor<([^,>]*)x\w+, (#[^\n]*)>"
)
_REGISTERS: Final = re.compile(r"register = \[\[([^\]]*)\], \[([^\]]*)\]")
_BLOCKED: Final = re.compile(r"blocked<\{sizePerThread = \[([^\]]*)\].*order = \[([^\]]*)\]")


def check_packing(ttgir: str) -> None:
    """Check every instruction of a kernel, in Triton's GPU language, that returns four bytes.

    Raises:
        RuntimeError: the four are not neighbours on the last axis.
    """
    aliases = dict(_ALIAS.findall(ttgir))
    found_all = _FOUR.findall(ttgir)
    if len(found_all) != ttgir.count("packed_element = 4"):
        raise RuntimeError("this release of Triton writes its GPU language in another way")
    for size, alias in found_all:
        layout = aliases.get(alias, alias)
        if not size.endswith("x4") or not _has_neighbours(layout, size.count("x") + 1):
            raise RuntimeError(
                "this release of Triton lays a tile out in a way that the kernel cannot use "
                f"({size}, {layout}): choose another tile, or --backend torch"
            )


def _has_neighbours(layout: str, axes: int) -> bool:
    """Whether the registers of a thread begin with four neighbours on the last of some axes."""
    blocked = _BLOCKED.search(layout)
    if blocked is not None:
        sizes, order = ([int(number) for number in each.split(",")] for each in blocked.groups())
        return order[0] == axes - 1 and sizes[-1] % 4 == 0
    registers = _REGISTERS.search(layout)
    if registers is None:
        return False
    found = [[int(number) for number in each.split(",")] for each in registers.groups()]
    return found == [[0] * (axes - 1) + [step] for step in (1, 2)]
