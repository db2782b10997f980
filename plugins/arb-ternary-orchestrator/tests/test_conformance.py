"""The optimizers of float parameters pass the conformance suite; most of them in slow tests."""

from __future__ import annotations

from typing import ClassVar

import pytest

from arb_ternary_testing import OptimizerSuite

ADAMW = {"name": "adamw", "lr": 0.01}


@pytest.mark.slow
class TestLion(OptimizerSuite):
    component = "lion"
    options: ClassVar = {"lr": 0.004, "weight_decay": 0.1}


@pytest.mark.slow
class TestSGD(OptimizerSuite):
    component = "sgd"
    options: ClassVar = {"lr": 0.05, "nesterov": True, "weight_decay": 0.01}


class TestSWATS(OptimizerSuite):
    """Both phases: it may switch from the eleventh step on, and a rate hardly changes by a
    hundredth.
    """

    component = "swats"
    options: ClassVar = {"adam_lr": 0.01, "switch_threshold": 0.01, "min_steps_before_switch": 10}


class TestAdaGC(OptimizerSuite):
    component = "adagc"
    options: ClassVar = {"inner": ADAMW, "warmup": 4}


@pytest.mark.slow
class TestGradientSmoother(OptimizerSuite):
    component = "gradient_smoother"
    options: ClassVar = {"inner": {"name": "sgd", "lr": 0.05, "momentum": 0.0}}


@pytest.mark.slow
class TestGradientNoise(OptimizerSuite):
    component = "gradient_noise"
    options: ClassVar = {"inner": ADAMW}


class TestNowcasting(OptimizerSuite):
    component = "nowcasting"
    options: ClassVar = {"inner": ADAMW, "every": 7, "window": 3, "spacing": 2, "horizon": 3}


@pytest.mark.slow
class TestWrappersInWrappers(OptimizerSuite):
    component = "nowcasting"
    options: ClassVar = {
        "every": 6,
        "window": 3,
        "spacing": 1,
        "inner": {
            "name": "gradient_smoother",
            "inner": {"name": "adagc", "inner": {"name": "swats"}},
        },
    }


@pytest.mark.slow
class TestInsideGradientQualityControl(OptimizerSuite):
    component = "gqc.sbc"
    options: ClassVar = {
        "initial_logical_batch_size": 2.0,
        "inner": {
            "name": "adagc",
            "warmup": 4,
            "inner": {"name": "gradient_noise", "inner": ADAMW},
        },
    }
    parts = ("float",)
    draws = 2


@pytest.mark.slow
class TestAroundGradientQualityControl(OptimizerSuite):
    component = "adagc"
    options: ClassVar = {
        "warmup": 4,
        "inner": {"name": "gqc.sbc", "initial_logical_batch_size": 2.0, "inner": ADAMW},
    }
    parts = ("float",)
    draws = 2


@pytest.mark.slow
class TestUnderSplit(OptimizerSuite):
    component = "split"
    options: ClassVar = {
        "ternary": {"name": "sign_votes", "accum_threshold": 4},
        "float": {
            "name": "adagc",
            "warmup": 4,
            "inner": {"name": "nowcasting", "every": 17, "inner": ADAMW},
        },
    }
    parts = ("mixed",)
