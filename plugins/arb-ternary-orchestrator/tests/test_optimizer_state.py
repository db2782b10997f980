"""Resumed, copied and pickled optimizers continue bitwise, and plan the size of their state."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from arb_ternary.optim.protocol import Trainable, inner_optimizers
from arb_ternary_testing.component import make_choice
from arb_ternary_train.audit import optimizer_state_bytes
from arb_ternary_train.checkpoint_format import decode_state, encode_state
from arb_ternary_train.optim.planned_state import planned_state_bytes

SGD = {"name": "sgd", "lr": 0.05}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "lion": {"lr": 0.003, "weight_decay": 0.1},
    "sgd": {"lr": 0.05, "nesterov": True},
    "swats": {
        "adam_lr": 0.01,
        "beta2": 0.9,
        "switch_threshold": 0.01,
        "min_steps_before_switch": 9,
        "weight_decay": 0.1,
    },
    "adagc": {"inner": SGD, "warmup": 5},
    "gradient_smoother": {"inner": SGD},
    "gradient_noise": {"inner": SGD, "seed": 5},
    "nowcasting": {"inner": SGD, "every": 7, "window": 3, "spacing": 2, "horizon": 4},
}
ALL = [
    *OPTIMIZERS.items(),
    (
        "nowcasting",
        {
            "every": 6,
            "spacing": 1,
            "inner": {
                "name": "gradient_noise",
                "inner": {
                    "name": "adagc",
                    "warmup": 3,
                    "inner": {"name": "gradient_smoother", "inner": "adamw"},
                },
            },
        },
    ),
]
SHAPES = {"matrix": (4, 6), "other": (2, 3), "gain": (5,), "scalar": (), "empty": (0, 4)}
STEPS = 24


def start(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> tuple[list[torch.nn.Parameter], Any]:
    """Return parameters and an optimizer with a group of matrices and one of vectors."""
    random = np.random.default_rng(7)
    weights = {
        key: torch.nn.Parameter(torch.tensor(random.normal(size=s)).to(dtype))
        for key, s in SHAPES.items()
    }
    return list(weights.values()), make_choice("optimizer", name, options).build(
        Trainable(floats=weights)
    )


def go_on(weights: list[torch.nn.Parameter], optimizer: Any, first: int, last: int) -> None:
    """Take steps towards zero; every third step has no gradient of the second matrix."""
    for step in range(first, last):
        for index, weight in enumerate(weights):
            random = np.random.default_rng((step, index))
            noise = torch.from_numpy(np.asarray(random.standard_normal(tuple(weight.shape)))).to(
                weight.dtype
            )
            weight.grad = (
                None if index == 1 and step % 3 == 0 else 0.5 * weight.detach() + 0.1 * noise
            )
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 - step / (2 * STEPS))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "options"), ALL)
def test_resumed_optimizer_continues_bitwise(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    weights, optimizer = start(name, options, dtype)
    saved = {}
    for step in range(STEPS):
        if step in (0, 5, 13, 20):
            tree, tensors = encode_state(optimizer.state_dict())
            kept = {key: value.clone() for key, value in tensors.items()}
            saved[step] = json.dumps(tree), kept, [weight.detach().clone() for weight in weights]
        go_on(weights, optimizer, step, step + 1)
    assert all(bool(weight.isfinite().all()) for weight in weights)
    for step, (text, tensors, values) in saved.items():
        others, other = start(name, options, dtype)
        for weight, value in zip(others, values, strict=True):
            weight.data.copy_(value)
        other.load_state_dict(decode_state(json.loads(text), tensors))
        go_on(others, other, step, STEPS)
        assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True)), step
        assert encode_state(other.state_dict())[0] == encode_state(optimizer.state_dict())[0]


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
    ids=["copy", "pickle"],
)
@pytest.mark.parametrize(("name", "options"), ALL)
def test_copied_optimizer_continues_bitwise(
    name: str, options: dict[str, Any], duplicate: Any
) -> None:
    weights, optimizer = start(name, options, torch.float32)
    go_on(weights, optimizer, 0, 12)
    others, other = duplicate((weights, optimizer))
    go_on(weights, optimizer, 12, STEPS)
    go_on(others, other, 12, STEPS)
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "options"), ALL)
def test_planned_state_bytes_match_the_state(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    weights, optimizer = start(name, options, dtype)
    planned = planned_state_bytes(optimizer)
    kept = []
    for step in range(STEPS):
        go_on(weights, optimizer, step, step + 1)
        kept.append(optimizer_state_bytes(optimizer))
    assert planned == max(kept)


@pytest.mark.parametrize(("name", "options"), ALL)
def test_parameter_without_gradient_does_not_change(name: str, options: dict[str, Any]) -> None:
    weights, optimizer = start(name, options, torch.float32)
    before = [weight.detach().clone() for weight in weights]
    for _ in range(STEPS):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))


@pytest.mark.parametrize(("name", "options"), ALL)
def test_groups_work_with_a_torch_scheduler(name: str, options: dict[str, Any]) -> None:
    _, optimizer = start(name, options, torch.float32)
    groups = [[weight.dim() for weight in group["params"]] for group in optimizer.param_groups]
    assert groups == [[2, 2, 2], [1, 0]]
    assert {group["kind"] for group in optimizer.param_groups} == {"float"}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    rate = optimizer.param_groups[0]["lr"]
    optimizer.step()
    scheduler.step()
    innermost = list(inner_optimizers(optimizer))[-1]
    assert [group["lr"] for group in innermost.param_groups] == [rate / 2] * 2
    assert len(list(inner_optimizers(optimizer))) == 1 + json.dumps(options).count("inner")


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_closure_is_called_once(name: str) -> None:
    weights, optimizer = start(name, OPTIMIZERS[name], torch.float32)
    before = weights[0].detach().clone()
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        loss = (weights[0] ** 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).tolist() == pytest.approx(float((before**2).sum()))
    assert calls == [True]
    assert not torch.equal(weights[0], before)
