"""The built-in strategies train models of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from arb_ternary.optim.protocol import build_optimizer, collect_trainable
from arb_ternary.plugins.manager import manager
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_orchestrator.built_in import STRATEGIES
from arb_ternary_orchestrator.strategies import (
    Strategy,
    find_strategy,
    strategies_named,
)
from arb_ternary_orchestrator.strategies.carry import carry_state
from arb_ternary_testing.component import make_choice

FLOAT = {"name": "adamw", "lr": 0.001}
TERNARY = {"name": "scaled_votes"}
CONFIGURED: dict[str, tuple[str, Any]] = {
    "float": ("adamw", {"lr": 0.001}),
    "ternary": ("scaled_votes", {}),
    "signs": ("sign_votes", {}),
    "momentum": ("momentum_votes", {}),
    "mixed": ("split", {"ternary": TERNARY, "float": FLOAT}),
    "lion": ("lion", {}),
    "wrapped": ("gqc.gnr", {"inner": {"name": "split", "ternary": TERNARY, "float": FLOAT}}),
}


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    votes: list[nn.Module] = [
        TernaryLinear(32, 32, group_size=32, activations="float", scale_rule="frozen")
    ]
    if kind in ("ternary", "signs", "momentum"):
        return nn.Sequential(*votes)
    floats = [nn.Linear(32, 32), nn.LayerNorm(32)]
    return nn.Sequential(*floats) if kind in ("float", "lion") else nn.Sequential(*floats, *votes)


def test_built_in_strategies_are_registered() -> None:
    registered = manager().registry.by_name("arb_register_strategies")
    assert registered.keys() - {"soar", "dive"} == STRATEGIES.keys()
    assert {name: registered[name].summary for name in STRATEGIES} == STRATEGIES


@pytest.mark.parametrize("kind", CONFIGURED)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains_every_kind_of_model(name: str, kind: str) -> None:
    network = model(kind)
    (rule, options) = CONFIGURED[kind]
    configured = make_choice("optimizer", rule, options)
    strategy = find_strategy(name)
    old = build_optimizer("optimizer", configured, collect_trainable(network))
    adjustment = strategy.adjustment(configured)
    assert adjustment.float_rate > 0
    assert adjustment.ternary_rate > 0
    before = {key: value.clone() for key, value in network.state_dict().items()}
    generator = torch.Generator().manual_seed(1)

    def train(optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            network(torch.randn(4, 32, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(old, 3)
    new = build_optimizer("optimizer", strategy.optimizer(configured), collect_trainable(network))
    carry_state(old, new)
    train(new, 3)
    changed = [
        key for key, value in network.state_dict().items() if not torch.equal(value, before[key])
    ]
    assert changed


@pytest.mark.parametrize("kind", ["float", "ternary", "mixed"])
def test_conservative_is_slower_and_aggressive_is_faster(kind: str) -> None:
    configured = make_choice("optimizer", *CONFIGURED[kind])
    for style in ("adamw", "votes"):
        careful = find_strategy(f"conservative_{style}").adjustment(configured)
        bold = find_strategy(f"aggressive_{style}").adjustment(configured)
        assert careful.float_rate < 1 < bold.float_rate
        assert careful.ternary_rate < 1 < bold.ternary_rate
    resistant = find_strategy("spike_resistant")
    careful = find_strategy("conservative_adamw")
    assert resistant.adjustment(configured).float_rate < careful.adjustment(configured).float_rate
    assert (
        resistant.adjustment(configured).ternary_rate < careful.adjustment(configured).ternary_rate
    )


def test_strategies_suit_phases() -> None:
    strategies = [find_strategy(name) for name in STRATEGIES]

    def suitable(phase: str) -> set[str]:
        return {strategy.name for strategy in strategies if phase in strategy.suits}

    assert suitable("plateau") == suitable("late") == {"sgd_escape"}
    assert suitable("mid") == set()
    assert suitable("unstable") == {"conservative_adamw", "conservative_votes", "spike_resistant"}
    assert suitable("early") == {"conservative_adamw", "conservative_votes"}
    assert suitable("converging") == {"aggressive_adamw", "aggressive_votes"}
    with pytest.raises(ValueError, match="must be in"):
        Strategy(name="mine", summary="", suits=("plato",))  # type: ignore[arg-type]


def test_default_choice_is_built_in_and_named_strategies() -> None:
    assert strategies_named("bold", "safe", ["other", "bold"]) == ("bold", "safe", "other")
    without = strategies_named("soar", "spike_resistant", None)
    assert without[:2] == ("soar", "spike_resistant")
    assert sorted(without) == sorted(["soar", *STRATEGIES])
