"""Lion and SGD compared with their formulas in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from arb_ternary.errors import ConfigError
from arb_ternary_orchestrator import Lion

SHAPES = [(3, 5), (7,), (1,), (2, 3, 4)]


def gradients(step: int) -> list[np.ndarray]:
    random = np.random.default_rng(step)
    return [
        random.standard_normal(shape).astype(np.float32) * 10.0 ** (step % 5 - 2)
        for shape in SHAPES
    ]


def start() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.from_numpy(value)) for value in gradients(1000)]


def run(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter], steps: int) -> None:
    for step in range(steps):
        for weight, gradient in zip(weights, gradients(step), strict=True):
            weight.grad = torch.from_numpy(gradient)
        optimizer.step()


def test_lion_matches_its_formula() -> None:
    weights = start()
    run(Lion(weights, lr=0.01, betas=(0.8, 0.95), weight_decay=0.3), weights, 25)
    for index, weight in enumerate(gradients(1000)):
        expected = weight.astype(np.float64)
        momentum = np.zeros_like(weight, dtype=np.float64)
        for step in range(25):
            gradient = gradients(step)[index]
            direction = np.sign(0.8 * momentum + 0.2 * gradient)
            expected = expected - 0.01 * (direction + 0.3 * expected)
            momentum = 0.95 * momentum + 0.05 * gradient
        np.testing.assert_allclose(weights[index].detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_first_step_of_lion_is_rate_times_sign() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.tensor([1e-20, -3.0, 0.0, 1e20])
    Lion([weight], lr=0.5).step()
    assert weight.tolist() == [-0.5, 0.5, 0.0, -0.5]


def test_momentum_of_bfloat16_parameters_is_float32() -> None:
    """In bfloat16 ``1 + 0.001`` is 1, so an average in bfloat16 would stand still."""
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = Lion([weight], betas=(0.9, 0.999))
    for _ in range(100):
        weight.grad = torch.ones(2, dtype=torch.bfloat16)
        optimizer.step()
    (momentum,) = (state["momentum"] for state in optimizer.state.values())
    np.testing.assert_allclose(momentum.numpy(), 1 - 0.999**100, rtol=1e-5)
    assert weight.dtype == torch.bfloat16


def test_sgd_matches_its_formula() -> None:
    weights = start()
    run(
        torch.optim.SGD(weights, lr=0.01, momentum=0.7, weight_decay=0.1, nesterov=True),
        weights,
        20,
    )
    for index, weight in enumerate(gradients(1000)):
        expected = weight.astype(np.float64)
        momentum = None
        for step in range(20):
            gradient = gradients(step)[index] + 0.1 * expected
            momentum = gradient if momentum is None else 0.7 * momentum + gradient
            expected = expected - 0.01 * (gradient + 0.7 * momentum)
        np.testing.assert_allclose(weights[index].detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_invalid_parameters_and_gradients_are_refused() -> None:
    packed = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.int32), requires_grad=False)
    weight = start()[0]
    with pytest.raises(
        ConfigError, match=r"parameter 1: torch.int32, \(2, 2\); .*ternary modules learn by votes"
    ):
        Lion([weight, packed])
    optimizer = Lion([weight])
    with pytest.raises(ConfigError, match="group 1"):
        optimizer.add_param_group({"params": [packed]})
    assert len(optimizer.param_groups) == 1
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    dense = torch.nn.Parameter(torch.ones(2))
    optimizer = Lion([dense, *embedding.parameters()])
    (embedding(torch.tensor([1])).sum() + dense.sum()).backward()
    with pytest.raises(ConfigError, match="sparse"):
        optimizer.step()
    assert dense.tolist() == [1.0, 1.0]
