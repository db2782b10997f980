"""Run the suite that every optimizer must pass on those that the kit depends on."""

from __future__ import annotations

from typing import ClassVar

from arb_ternary_testing import OptimizerSuite


class TestSignVotes(OptimizerSuite):
    component = "sign_votes"


class TestSignVotesWithEveryOption(OptimizerSuite):
    component = "sign_votes"
    options: ClassVar = {
        "accum_threshold": 9,
        "e_accum_threshold": 20,
        "band": 1,
        "leak": 3,
        "gain": 0.5,
        "lr": 0.8,
    }


class TestAdamW(OptimizerSuite):
    component = "adamw"


class TestSplit(OptimizerSuite):
    component = "split"
    options: ClassVar = {
        "ternary": {"name": "sign_votes", "accum_threshold": 16},
        "float": {"name": "adamw", "lr": 0.01},
    }


class TestScaledVotes(OptimizerSuite):
    component = "scaled_votes"


class TestScaledVotesWithEveryOption(OptimizerSuite):
    component = "scaled_votes"
    options: ClassVar = {
        "lr": 0.1,
        "carry": False,
        "leak": 0.02,
        "clip": 2.0,
        "cell": 32,
        "magnitude_decay": 0.9,
    }
