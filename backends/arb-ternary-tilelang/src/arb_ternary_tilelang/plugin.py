"""Hook implementations. Imported by every command: nothing heavy here."""

from __future__ import annotations

from collections.abc import Sequence

from arb_ternary import hookimpl
from arb_ternary.environment import Variable
from arb_ternary.specs import BackendSpec

ARB_API_VERSION = (1, 0)

CXX = Variable(
    "CXX",
    "",
    "the C++ compiler of kernels that are compiled for the CPU; empty takes the first that is "
    "found",
)
CUDA_HOME = Variable(
    "CUDA_HOME",
    "",
    "the CUDA toolkit that compiles kernels; empty looks for nvcc in PATH and /usr/local/cuda",
)


@hookimpl
def arb_register_backends() -> Sequence[BackendSpec]:
    """Register the TileLang backend.

    Its priority is below the torch backend's 0, because it has been timed on no GPU. It is used
    only if it is named.
    """
    return (
        BackendSpec(
            name="tilelang",
            target="arb_ternary_tilelang.backend:build",
            probe="arb_ternary_tilelang.probe:probe",
            priority=-10,
            devices=("cuda", "cpu"),
            summary="TileLang kernels: int8 tensor cores on CUDA, C++ on the CPU",
            variables=(CXX, CUDA_HOME),
            libraries=("tilelang",),
        ),
    )
