"""The conformance kit: test suites that every component of a kind must pass.

A plugin's own tests subclass the suite of its component::

    from arb_ternary_testing import OptimizerSuite

    class TestMine(OptimizerSuite):
        component = "mine"

Expected numbers come from restatements of the rules in numpy
(``arb_ternary_testing.restatement``), never from the reference backend: the reference must pass
the same suites.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from arb_ternary_testing.backend import BackendSuite
    from arb_ternary_testing.expected_failures import expect_failures
    from arb_ternary_testing.fakes import install_fake_plugin
    from arb_ternary_testing.masking import MaskingSuite
    from arb_ternary_testing.optimizer import OptimizerSuite
    from arb_ternary_testing.phase import PhaseSuite

_LAZY = {
    "BackendSuite": "arb_ternary_testing.backend",
    "MaskingSuite": "arb_ternary_testing.masking",
    "OptimizerSuite": "arb_ternary_testing.optimizer",
    "PhaseSuite": "arb_ternary_testing.phase",
    "expect_failures": "arb_ternary_testing.expected_failures",
    "install_fake_plugin": "arb_ternary_testing.fakes",
}

__all__ = [
    "BackendSuite",
    "MaskingSuite",
    "OptimizerSuite",
    "PhaseSuite",
    "expect_failures",
    "install_fake_plugin",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
