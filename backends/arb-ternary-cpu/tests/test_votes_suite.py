"""The kit's tests of votes, cast and sent, for every instruction set that this processor runs.

The suite of the whole backend tries every case with the fastest one: see test_products_suite.py.
"""

from __future__ import annotations

import pytest

from arb_ternary.backends.protocol import KernelBackend
from arb_ternary_cpu.backend import build
from arb_ternary_cpu.isa import usable_isas
from arb_ternary_testing.backend_narrow_votes import NarrowVoteTests
from arb_ternary_testing.backend_scaled_votes import ScaledVoteTests
from arb_ternary_testing.backend_votes import VoteTests
from arb_ternary_testing.backend_wire import WireTests


@pytest.mark.sampled
class _Votes(VoteTests, ScaledVoteTests, NarrowVoteTests, WireTests):
    isa = "scalar"

    def make_backend(self) -> KernelBackend:
        return build(self.isa)


class TestScalar(_Votes):
    """Without vector instructions; the others are made below."""


for _isa in usable_isas():
    if _isa != "scalar":
        globals()[f"Test{_isa.title()}"] = type(f"Test{_isa.title()}", (_Votes,), {"isa": _isa})
