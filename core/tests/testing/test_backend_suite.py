"""The torch backend passes the suite that every backend has to pass."""

from __future__ import annotations

from arb_ternary.backends import reference
from arb_ternary.backends.protocol import KernelBackend
from arb_ternary.testing import BackendSuite


class TestTorchBackend(BackendSuite):
    def make_backend(self) -> KernelBackend:
        return reference.build()
