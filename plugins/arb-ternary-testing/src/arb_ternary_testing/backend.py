"""The suite of a kernel backend."""

from __future__ import annotations

from arb_ternary_testing.backend_layout import LayoutTests
from arb_ternary_testing.backend_narrow_votes import NarrowVoteTests
from arb_ternary_testing.backend_products import ProductTests
from arb_ternary_testing.backend_scaled_votes import ScaledVoteTests
from arb_ternary_testing.backend_votes import VoteTests
from arb_ternary_testing.backend_wire import WireTests


class BackendSuite(
    LayoutTests, ProductTests, VoteTests, ScaledVoteTests, NarrowVoteTests, WireTests
):
    """Tests that every :class:`~arb_ternary.backends.protocol.KernelBackend` must pass.

    Subclass it in a class whose name starts with ``Test`` and set ``component`` to the registered
    name (or override ``make_backend``). ``device`` is the device that the kernels are tried on;
    make one subclass per device. Tests of optional ops that the backend leaves to the reference,
    and of capabilities that it does not declare, are skipped with the reason.

    Integer results, and results that one rounding derives from them, are compared bit for bit.
    Float products are compared with the error bound of a dot product. Fresh memory is filled with
    NaN, so that an output that was not written shows.
    """
