"""Causal masking passes the suite that every masking strategy has to pass."""

from __future__ import annotations

from arb_ternary.testing import MaskingSuite


class TestCausal(MaskingSuite):
    component = "causal"
