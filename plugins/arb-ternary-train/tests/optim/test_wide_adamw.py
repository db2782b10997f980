"""AdamW on float16 parameters: float32 state, a float32 copy that learns, and a state dict that
keeps both.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from arb_ternary.optim.protocol import Trainable
from arb_ternary_train.optim.adamw import build
from arb_ternary_train.optim.config import AdamWConfig
from arb_ternary_train.optim.wide_adamw import WideAdamW

CONFIG = AdamWConfig(lr=1e-3)


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"matrix": (3, 4), "gain": (5,)}
    drawn = {name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()}
    return {name: nn.Parameter(value.to(dtype)) for name, value in drawn.items()}


def give_gradients(floats: dict[str, nn.Parameter], seed: int, size: float = 1e-4) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in floats.values():
        gradient = (size * torch.randn(parameter.shape, generator=generator)).half()
        parameter.grad = gradient.to(parameter.dtype)


def test_master_weights_equal_float32_training() -> None:
    narrow = parameters(torch.float16)
    wide = parameters(torch.float32)
    optimizer = build(CONFIG, Trainable(floats=narrow))
    reference = build(CONFIG, Trainable(floats=wide))
    assert isinstance(optimizer, WideAdamW)
    assert not isinstance(reference, WideAdamW)
    for step in range(20):
        give_gradients(narrow, step)
        give_gradients(wide, step)
        optimizer.step()
        reference.step()
    for name, parameter in narrow.items():
        assert torch.equal(optimizer.state[parameter]["master"], wide[name])
        assert torch.equal(parameter, wide[name].half())
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float16
        # Twenty steps of 1e-3: torch's own would have moved by the gradient over eps, thousands of
        # times as far.
        assert (parameter - parameters(torch.float16)[name]).abs().max().item() < 0.05


def test_a_mixed_model_steps_all_its_parameters() -> None:
    floats = {
        "half": parameters(torch.float16)["matrix"],
        "full": parameters(torch.float32)["gain"],
    }
    before = {name: parameter.detach().clone() for name, parameter in floats.items()}
    optimizer = build(CONFIG, Trainable(floats=floats))
    give_gradients(floats, 0, size=1.0)
    optimizer.step()
    for name, parameter in floats.items():
        assert not torch.equal(parameter, before[name])
    assert "master" not in optimizer.state[floats["full"]]


def test_a_saved_and_loaded_optimizer_goes_on_with_the_same_bits() -> None:
    first = parameters(torch.float16)
    optimizer = build(CONFIG, Trainable(floats=first))
    for step in range(5):
        give_gradients(first, step)
        optimizer.step()
    second = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in first.items()}
    resumed = build(CONFIG, Trainable(floats=second))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for floats, stepper in ((first, optimizer), (second, resumed)):
        for step in range(5, 9):
            give_gradients(floats, step)
            stepper.step()
    for name in first:
        assert torch.equal(first[name], second[name])
        for key in ("exp_avg", "exp_avg_sq", "master"):
            found = resumed.state[second[name]][key]
            assert found.dtype == torch.float32
            assert torch.equal(found, optimizer.state[first[name]][key])


def test_weights_that_were_loaded_between_steps_are_what_goes_on() -> None:
    floats = parameters(torch.float16)
    optimizer = build(CONFIG, Trainable(floats=floats))
    give_gradients(floats, 0)
    optimizer.step()
    with torch.no_grad():
        floats["gain"].fill_(2.0)
    give_gradients(floats, 1)
    optimizer.step()
    assert floats["gain"].detach().float().mean().item() == pytest.approx(2.0, abs=0.01)


def test_a_closure_is_called_once_and_its_loss_comes_back() -> None:
    floats = parameters(torch.float16)
    optimizer = build(CONFIG, Trainable(floats=floats))
    calls = []

    def closure() -> float:
        calls.append(1)
        give_gradients(floats, 3)
        return 1.5

    assert optimizer.step(closure) == 1.5
    assert len(calls) == 1


def test_hooks_are_called_once_per_step() -> None:
    # torch then wraps its own class's step too
    build(CONFIG, Trainable(floats=parameters(torch.float32))).step()
    optimizer = build(CONFIG, Trainable(floats=parameters(torch.float16)))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step()
    assert calls == ["before", "after"]
