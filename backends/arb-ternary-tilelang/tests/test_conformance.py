"""The kit's suite on the CPU: kernels compiled as C++."""

from __future__ import annotations

from arb_ternary_testing import BackendSuite


class TestCpu(BackendSuite):
    """Every op, as a run on the CPU gets it."""

    component = "tilelang"
