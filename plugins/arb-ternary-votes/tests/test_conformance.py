"""The suite of optimizers on rules and options that the core does not test."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_testing import OptimizerSuite


class TestMomentumVotes(OptimizerSuite):
    component = "momentum_votes"


class TestWithoutMomentumAndCarry(OptimizerSuite):
    component = "momentum_votes"
    options: ClassVar = {
        "decay": 1.0,
        "carry": False,
        "flip_rate": 0.02,
        "power": 2.0,
        "quanta": 16.0,
    }


class TestNarrowIntegerVotes(OptimizerSuite):
    component = "momentum_votes"

    def make_model(self, part: str) -> nn.Module:
        return nn.Sequential(TernaryLinear(64, 4, group_size=32, gradients="int8", vote_bits=4))


class TestVotesOfThreeLevels(OptimizerSuite):
    component = "scaled_votes"
    options: ClassVar = {"vote_levels": 3, "lr": 0.3}


class TestNarrowIntegerVotesOfThreeLevels(OptimizerSuite):
    component = "scaled_votes"
    options: ClassVar = {"vote_levels": 3, "lr": 0.3}

    def make_model(self, part: str) -> nn.Module:
        return nn.Sequential(TernaryLinear(64, 4, group_size=32, gradients="int8", vote_bits=4))


class TestOrthogonalisedGradients(OptimizerSuite):
    component = "scaled_votes"
    options: ClassVar = {"orthogonal": True, "lr": 0.3}


class TestClippedGradients(OptimizerSuite):
    component = "scaled_votes"
    options: ClassVar = {"spectral_clip": True, "lr": 0.3}


class TestOrthogonalisedIntegerGradients(OptimizerSuite):
    component = "scaled_votes"
    options: ClassVar = {"orthogonal": True, "vote_levels": 3, "lr": 0.3}

    def make_model(self, part: str) -> nn.Module:
        return nn.Sequential(TernaryLinear(64, 4, group_size=32, gradients="int8"))
