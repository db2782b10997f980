"""The kit's tests of layout and products, for every instruction set that this processor runs.

The whole suite, with every case, runs once: on the fastest instruction set.
"""

from __future__ import annotations

import pytest

from arb_ternary.backends.protocol import KernelBackend
from arb_ternary_cpu.backend import build
from arb_ternary_cpu.isa import usable_isas
from arb_ternary_testing import BackendSuite
from arb_ternary_testing.backend_layout import LayoutTests
from arb_ternary_testing.backend_products import ProductTests


class TestConformance(BackendSuite):
    """The backend as a run gets it."""

    component = "cpu"


@pytest.mark.sampled
class _Products(LayoutTests, ProductTests):
    isa = "scalar"

    def make_backend(self) -> KernelBackend:
        return build(self.isa)


class TestScalar(_Products):
    """Without vector instructions; the others are made below."""


for _isa in usable_isas():
    if _isa != "scalar":
        globals()[f"Test{_isa.title()}"] = type(f"Test{_isa.title()}", (_Products,), {"isa": _isa})
