"""The optimizers of float parameters pass the suite that every optimizer has to pass."""

from __future__ import annotations

from typing import ClassVar

from arb_ternary_testing import OptimizerSuite


class TestLion(OptimizerSuite):
    component = "lion"
    options: ClassVar = {"lr": 0.004, "weight_decay": 0.1}
