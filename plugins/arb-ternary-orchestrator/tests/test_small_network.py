"""Each optimizer of float parameters teaches a small network; two of them are compared with Adam.

The network has 16 inputs, 32 hidden units and 4 classes, which another network of random weights
has chosen for 512 samples; 300 batches of 32, and a rate that falls along a cosine, as in a run.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from arb_ternary.optim.protocol import collect_trainable
from arb_ternary_testing.component import make_choice
from arb_ternary_train.schedules import apply_schedule

ADAMW = {"name": "adamw", "lr": 0.01}
#: Optimizer, its options, and the loss in nats that it has to reach from 1.4, the entropy of the
#: classes.
BOUNDS: list[tuple[str, dict[str, Any], float]] = [
    ("lion", {"lr": 0.003}, 0.4),
    ("sgd", {"lr": 0.1}, 0.2),
    ("swats", {"adam_lr": 0.01, "min_steps_before_switch": 50, "switch_threshold": 1e-3}, 0.3),
    ("adagc", {"inner": ADAMW, "warmup": 20}, 0.3),
    ("gradient_smoother", {"inner": {"name": "sgd", "lr": 0.5, "momentum": 0.0}}, 0.3),
    ("gradient_noise", {"inner": ADAMW, "eta": 1e-4}, 0.3),
    ("nowcasting", {"inner": ADAMW, "every": 25}, 0.25),
]
#: Optimizers whose test is not slow.
QUICK = ("swats", "adagc", "nowcasting")


@cache
def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, first, second = (
        torch.randn(*shape, generator=generator) for shape in ((512, 16), (16, 8), (8, 4))
    )
    return x, (torch.tanh(x @ first) @ second).argmax(1)


def trained(
    name: str, options: dict[str, Any], seed: int = 0, schedule: Any = "cosine"
) -> tuple[float, Any]:
    """Return the final loss over all samples, and the optimizer."""
    steps = 300
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = make_choice("optimizer", name, options).build(collect_trainable(model))
    (x, y) = samples()
    generator = torch.Generator().manual_seed(2)
    for step in range(steps):
        apply_schedule(
            optimizer, schedule, step, steps=steps, warmup=0, lr=None, min_lr=None, min_rate=0.05
        )
        rows = torch.randint(0, 512, (32,), generator=generator)
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), y)), optimizer


@pytest.mark.parametrize(
    ("name", "options", "bound"),
    [
        pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.slow, id=case[0])
        for case in BOUNDS
    ],
)
def test_loss_falls_below_a_bound(name: str, options: dict[str, Any], bound: float) -> None:
    loss, _ = trained(name, options)
    assert loss < bound


@pytest.mark.slow
@pytest.mark.parametrize("lr", [0.01, 0.002])
def test_nowcasting_ends_below_adam_alone(lr: float) -> None:
    for seed in range(3):
        inner = {"name": "adamw", "lr": lr}
        alone, _ = trained("adamw", {"lr": lr}, seed)
        assert trained("nowcasting", {"inner": inner, "every": 25}, seed)[0] < alone


@pytest.mark.slow
def test_nowcasting_at_a_constant_rate() -> None:
    """Nowcasting gains nothing with AdamW and harms momentum: docs/explanation/orchestration.md."""
    for options, bounds in ((ADAMW, (1.0, 1.5)), ({"name": "sgd", "lr": 0.1}, (3.0, 8.0))):
        alone, jumping = (
            sum(trained(name, given, seed, "constant")[0] for seed in range(3))
            for name, given in (
                (options["name"], {"lr": options["lr"]}),
                ("nowcasting", {"inner": options, "every": 25}),
            )
        )
        assert bounds[0] < jumping / alone < bounds[1]


@pytest.mark.slow
def test_swats_ends_within_five_percent_of_adam() -> None:
    """SWATS gains nothing here: 300 steps are few, and the rate of SGD has not settled when the
    threshold is met.
    """
    for seed in range(3):
        adam, _ = trained("adamw", {"lr": 0.01, "weight_decay": 0.0, "beta2": 0.999}, seed)
        options = {"adam_lr": 0.01, "min_steps_before_switch": 50, "switch_threshold": 1e-3}
        loss, optimizer = trained("swats", options, seed)
        assert any(group["phase"] == "sgd" for group in optimizer.param_groups)
        assert loss < 1.05 * adam


def test_swats_before_the_switch_is_adam() -> None:
    """torch's Adam adds ``eps`` to the root after its correction, not before, which changes 1e-8 a
    little.
    """
    torch.manual_seed(0)
    models = [nn.Linear(6, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        torch.optim.Adam(models[0].parameters(), lr=0.01),
        make_choice("optimizer", "swats", {"adam_lr": 0.01}).build(collect_trainable(models[1])),
    ]
    for step in range(60):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip(models, optimizers, strict=True):
            (model(x) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(models[1].weight, models[0].weight, rtol=1e-4, atol=1e-6)


def test_swats_and_nowcasting_on_a_quadratic() -> None:
    """Adam at a constant rate goes on stepping by about the rate; SGD's steps shrink with the
    gradient. A jump goes further down for nothing.
    """
    curvatures = torch.linspace(0.5, 2.0, 8)

    def after(name: str, options: dict[str, Any], steps: int, curvature: torch.Tensor) -> float:
        model = nn.ParameterList([torch.full((1, 8), 2.0)])
        optimizer = make_choice("optimizer", name, options).build(collect_trainable(model))
        for _ in range(steps):
            model[0].grad = curvature * model[0].detach()
            optimizer.step()
        return float((curvature * model[0].detach() ** 2).sum())

    adam = {"beta1": 0.9, "beta2": 0.9}
    switching = {**adam, "adam_lr": 0.05, "switch_threshold": 0.02, "min_steps_before_switch": 15}
    assert after("swats", switching, 400, curvatures) < after(
        "swats", {"adam_lr": 0.05, **adam}, 400, curvatures
    )

    descent = {"name": "sgd", "lr": 0.05, "momentum": 0.0}
    jumping = {"inner": descent, "every": 10, "window": 4, "spacing": 2, "horizon": 6}
    ahead = after("nowcasting", {**jumping, "trust_ratio": None}, 40, curvatures)
    assert ahead < after("sgd", {"lr": 0.05, "momentum": 0.0}, 50, curvatures)
