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
    """Everything that a :class:`~arb_ternary.backends.protocol.KernelBackend` has to do.

    Subclass it in a class whose name starts with ``Test`` and set ``component`` to the registered
    name (or override ``make_backend``). ``device`` chooses where the kernels are tried; make one
    subclass a device. Optional ops that the backend leaves to the reference, and capabilities that
    it does not declare, are skipped with the reason.

    Integer results and everything derived from them by one rounding are compared bit for bit, float
    products with the error bound of a dot product. Fresh memory is filled with NaN, so that an
    output that was not written shows.
    """
