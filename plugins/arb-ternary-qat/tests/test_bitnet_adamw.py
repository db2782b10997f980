"""``bitnet_adamw``: torch's AdamW whose weight decay ends."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from torch import nn

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Trainable, collect_trainable
from arb_ternary_qat.bitnet_adamw import BitnetAdamW, build
from arb_ternary_qat.config import BitnetAdamWConfig
from arb_ternary_testing import OptimizerSuite


class TestBitnetAdamW(OptimizerSuite):
    component = "bitnet_adamw"
    options: ClassVar = {"weight_decay": 0.05, "decay_steps": 7}


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def made(decay_steps: int | None) -> tuple[nn.Module, BitnetAdamW]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, build(
        BitnetAdamWConfig(lr=0.1, weight_decay=0.5, decay_steps=decay_steps),
        collect_trainable(model),
    )


def test_decay_stops_and_adamw_continues() -> None:
    model, optimizer = made(3)
    stepped(optimizer, model, 8)
    torch.manual_seed(0)
    twin = nn.Linear(3, 2)
    groups = [
        {"params": [twin.weight], "weight_decay": 0.5},
        {"params": [twin.bias], "weight_decay": 0.0},
    ]
    torchs = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), fused=True)
    stepped(torchs, twin, 3)
    torchs.param_groups[0]["weight_decay"] = 0.0
    stepped(torchs, twin, 5, 3)
    assert torch.equal(model.weight, twin.weight)
    assert torch.equal(model.bias, twin.bias)


@pytest.mark.parametrize(
    ("decay_steps", "decays"), [(None, [0.5] * 4), (2, [0.5, 0.5, 0.0, 0.0]), (0, [0.0] * 4)]
)
def test_decay_lasts_for_the_given_steps(decay_steps: int | None, decays: list[float]) -> None:
    model, optimizer = made(decay_steps)
    seen = []
    for step in range(4):
        stepped(optimizer, model, 1, step)
        seen.append(optimizer.param_groups[0]["weight_decay"])
    assert seen == decays
    assert optimizer.param_groups[1]["weight_decay"] == 0.0


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_resumed_decay_ends_at_the_same_step(stop: int) -> None:
    model, optimizer = made(3)
    stepped(optimizer, model, stop)
    twin, other = made(3)
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(optimizer, model, 4, stop)
    stepped(other, twin, 4, stop)
    assert torch.equal(model.weight, twin.weight)


def test_model_without_float_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="bitnet_adamw trains float parameters"):
        build(BitnetAdamWConfig(), Trainable())
