"""Run the suite that every optimizer must pass, on each kind of model."""

from __future__ import annotations

from typing import ClassVar

from arb_ternary_testing import OptimizerSuite


class TestSignGSD(OptimizerSuite):
    component = "signgsd"
    parts = ("float", "ternary", "mixed")
    learning_steps = 200


class TestSignGSDWithDecay(OptimizerSuite):
    component = "signgsd"
    options: ClassVar = {
        "lr": 0.004,
        "weight_decay": 0.05,
        "foreach": True,
        "nan_policy": "zero",
        "votes": {"accum_threshold": 16},
    }
    parts = ("float", "mixed")
