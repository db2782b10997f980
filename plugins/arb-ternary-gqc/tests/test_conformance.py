"""The wrappers pass the suite of every optimizer, around optimizers of each kind of part."""

from __future__ import annotations

from typing import ClassVar

import pytest

from arb_ternary_testing import OptimizerSuite

SIGN_VOTES = {"name": "sign_votes", "accum_threshold": 4}
SPLIT = {"name": "split", "ternary": SIGN_VOTES, "float": {"name": "adamw", "lr": 0.01}}


class TestThreshold(OptimizerSuite):
    component = "gqc.gnts"
    # A module casts up to four votes in a step.
    options: ClassVar = {
        "inner": {**SPLIT, "ternary": {**SIGN_VOTES, "accum_threshold": 16}},
        "threshold": 0.5,
        "max_batch_draws": 4,
    }
    parts = ("mixed",)
    draws = 4


class TestThresholdOfTernaryModules(OptimizerSuite):
    component = "gqc.gnts"
    options: ClassVar = {
        "inner": SIGN_VOTES,
        "threshold": 0.5,
        "max_batch_draws": 3,
        "schedule": {"batches": 200, "warmup_batches": 10},
    }
    parts = ("ternary",)
    draws = 3


class TestThresholdOfSignGSD(OptimizerSuite):
    component = "gqc.gnts"
    options: ClassVar = {
        "inner": {"name": "signgsd", "lr": 0.004},
        "threshold": 0.5,
        "max_batch_draws": 3,
    }
    parts = ("float", "ternary", "mixed")
    draws = 3
    learning_steps = 400
    learning_share = 0.05


class TestRescaler(OptimizerSuite):
    component = "gqc.gnr"
    options: ClassVar = {"inner": SPLIT, "mode": "independent"}
    parts = ("mixed",)


@pytest.mark.filterwarnings("ignore:GradientNormRescaler")
class TestRescalerOfTernaryModules(OptimizerSuite):
    component = "gqc.gnr"
    options: ClassVar = {"inner": SIGN_VOTES}
    parts = ("ternary",)


class TestScheduledBatch(OptimizerSuite):
    component = "gqc.sbc"
    options: ClassVar = {"inner": {"name": "scaled_votes"}, "initial_logical_batch_size": 3.0}
    parts = ("ternary",)
    draws = 3
    learning_steps = 400


class TestHypothesisTest(OptimizerSuite):
    component = "gqc.mht"
    options: ClassVar = {
        "inner": {"name": "adamw", "lr": 0.01},
        "error_tolerance": 0.2,
        "max_batch_draws": 4,
    }
    parts = ("float",)
    draws = 4


class TestNoiseScale(OptimizerSuite):
    component = "gqc.gns"
    options: ClassVar = {"inner": SPLIT, "max_batch_draws": 4}
    parts = ("mixed",)
    draws = 4


class TestWrapperInAWrapper(OptimizerSuite):
    component = "gqc.gnr"
    options: ClassVar = {
        "inner": {"name": "gqc.sbc", "initial_logical_batch_size": 2.0, "inner": SPLIT}
    }
    parts = ("mixed",)
    draws = 2
