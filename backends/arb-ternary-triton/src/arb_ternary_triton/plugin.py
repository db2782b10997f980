"""Hook implementations. Imported by every command: nothing heavy here."""

from __future__ import annotations

from collections.abc import Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import BackendSpec

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_register_backends() -> Sequence[BackendSpec]:
    """The Triton backend; above the torch backend's 0, so that `auto` prefers it on a GPU."""
    return (
        BackendSpec(
            name="triton",
            target="arb_ternary_triton.backend:build",
            probe="arb_ternary_triton.probe:probe",
            priority=10,
            devices=("cuda", "cpu"),
            summary="Triton kernels for CUDA and ROCm; TRITON_INTERPRET=1 runs them on the CPU, slowly, for tests",
        ),
    )
