"""Hook implementations. Imported by every command: nothing heavy here."""

from __future__ import annotations

from collections.abc import Sequence

from arb_ternary import hookimpl
from arb_ternary.environment import Variable
from arb_ternary.specs import BackendSpec

ARB_API_VERSION = (1, 0)

ISA = Variable(
    "ARB_TERNARY_CPU_ISA",
    "",
    "instruction set of the `cpu` backend; an empty one takes the fastest",
)


@hookimpl
def arb_register_backends() -> Sequence[BackendSpec]:
    """The native backend; above the torch backend's 0, so that `auto` prefers it on CPU."""
    return (
        BackendSpec(
            name="cpu",
            target="arb_ternary_cpu.backend:build",
            probe="arb_ternary_cpu.probe:probe",
            priority=20,
            devices=("cpu",),
            summary="native kernels for x86-64 and arm64, 16 x 16 blocks of 2-bit codes",
            variables=(ISA,),
        ),
    )
