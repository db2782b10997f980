"""Hook implementations. Every command imports this module, so it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from arb_ternary import hookimpl
from arb_ternary.environment import Variable
from arb_ternary.specs import BackendSpec

ARB_API_VERSION = (1, 0)

INTERPRET = Variable(
    "TRITON_INTERPRET", "0", "Triton's own switch: 1 runs its kernels in an interpreter, on the CPU"
)
TUNE = Variable(
    "ARB_TERNARY_TRITON_TUNE",
    "0",
    "1 makes the `triton` backend measure tile sizes on the GPU and keep the fastest",
)
CACHE_HOME = Variable(
    "XDG_CACHE_HOME", "", "cache folder for measured tile sizes; empty means ~/.cache"
)


@hookimpl
def arb_register_backends() -> Sequence[BackendSpec]:
    """Register the Triton backend.

    Its priority is above the torch backend's 0, so that `auto` prefers it on a GPU.
    """
    return (
        BackendSpec(
            name="triton",
            target="arb_ternary_triton.backend:build",
            probe="arb_ternary_triton.probe:probe",
            priority=10,
            devices=("cuda", "cpu"),
            summary="Triton kernels for CUDA and ROCm; TRITON_INTERPRET=1 runs them on the CPU, "
            "slowly, for tests",
            variables=(INTERPRET, TUNE, CACHE_HOME),
            libraries=("triton",),
        ),
    )
