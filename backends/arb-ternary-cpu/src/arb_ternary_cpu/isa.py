"""The instruction set of the kernels: the fastest that the processor runs, or the one that is asked
for.
"""

from __future__ import annotations

from typing import Final

from arb_ternary.errors import EnvironmentProblem, UsageProblem, nearest
from arb_ternary_cpu import _native
from arb_ternary_cpu.plugin import ISA

#: Every instruction set that kernels are written for.
ISAS: Final = ("scalar", "avx2", "avxvnni", "avx512vnni", "avx512bf16", "amx", "neon")


def usable_isas() -> tuple[str, ...]:
    """The instruction sets that this build has kernels for and this processor runs, the fastest
    first.
    """
    return tuple(_native.usable_isas())


def chosen_isa(name: str | None = None) -> str:
    """``name``, else the value of ``ARB_TERNARY_CPU_ISA``, else the fastest usable instruction set.

    Raises:
        UsageProblem: there is no such instruction set.
        EnvironmentProblem: it cannot be used here.
    """
    usable = usable_isas()
    source = "instruction set" if name is not None else ISA.name
    wanted = (ISA.read() if name is None else name).strip().lower()
    if not wanted:
        return usable[0]
    listed = f"usable here: {', '.join(usable)}"
    if wanted not in ISAS:
        close = nearest(wanted, ISAS)
        raise UsageProblem(
            f"{source}: there are no kernels for {wanted!r}",
            f"did you mean {close!r}? {listed}" if close else listed,
        )
    if wanted not in usable:
        raise EnvironmentProblem(
            f"{source}: {wanted!r} cannot be used on this processor or in this build", listed
        )
    return wanted
