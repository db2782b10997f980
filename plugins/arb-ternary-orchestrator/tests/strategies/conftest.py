"""A third-party plugin with optimizers and strategies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from arb_ternary.plugins.manager import manager, reset_manager

PLUGIN = """
from attrs import frozen
import torch

from arb_ternary import hookimpl
from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.config.options import option
from arb_ternary.specs import OptimizerSpec
from arb_ternary_orchestrator.specs import StrategySpec
from arb_ternary_orchestrator.strategies import Strategy, with_options
from arb_ternary_votes.sign_votes import SignVotes

ARB_API_VERSION = (1, 0)


@frozen(kw_only=True)
class Bird:
    clip: float = option(9.0, "wings")
    lr: float = option(1.0, "rate")


def votes(config, trainable):
    return SignVotes(trainable.ternary, lr=config.lr)


def floats(config, trainable):
    return torch.optim.SGD([*trainable.floats.values()], lr=config.lr)


@frozen(kw_only=True)
class Nest:
    eggs: tuple[OptimizerChoice, ...] = option((), "several")
    twigs: int = option(3, "twigs")


def soar():
    return Strategy(name="soar", summary="higher", ternary_rate=3.0,
        float_leaf=lambda leaf: with_options(leaf, lr=7.0))


dive = Strategy(name="swoop", summary="of another name")


@hookimpl
def arb_register_optimizers():
    return [
        OptimizerSpec(name="bird_votes", target="birds:votes", config="birds:Bird",
            accepts={"ternary"}),
        OptimizerSpec(name="bird_floats", target="birds:floats", config="birds:Bird",
            accepts={"float"}),
        OptimizerSpec(name="nest", target="birds:votes", config="birds:Nest", accepts={"ternary",
            "float"}),
    ]


@hookimpl
def arb_register_strategies():
    return [StrategySpec(name="soar", target="birds:soar"), StrategySpec(name="dive",
        target="birds:dive")]
"""


@pytest.fixture(autouse=True, scope="module")
def _birds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Loads the plugin once per module, because loading takes longer than a test."""
    file = tmp_path_factory.mktemp("birds") / "birds.py"
    file.write_text(PLUGIN)
    reset_manager()
    manager().load_file(Path(file))
    yield
    reset_manager()
    sys.modules.pop("birds", None)
