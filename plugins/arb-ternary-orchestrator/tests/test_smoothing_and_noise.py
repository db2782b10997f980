"""Smoothed gradients compared with numpy; gradient noise by its statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.optim import SGD

from arb_ternary_orchestrator import GradientNoise, GradientSmoother

SHAPES = [(3, 4), (6,)]


def gradient(step: int, index: int) -> np.ndarray:
    return np.random.default_rng((step, index)).standard_normal(SHAPES[index]).astype(np.float32)


def test_smoothed_gradient_is_bias_corrected() -> None:
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = GradientSmoother(SGD(weights, lr=1.0, momentum=0.0), decay=0.8)
    averages = [np.zeros(shape) for shape in SHAPES]
    for step in range(25):
        for index, weight in enumerate(weights):
            weight.grad = torch.from_numpy(gradient(step, index))
            averages[index] = 0.8 * averages[index] + 0.2 * gradient(step, index).astype(np.float64)
        optimizer.step()
        for weight, average in zip(weights, averages, strict=True):
            assert weight.grad is not None
            np.testing.assert_allclose(
                weight.grad.numpy(), average / (1 - 0.8 ** (step + 1)), rtol=1e-4, atol=1e-6
            )


def test_constant_gradient_is_unchanged_by_smoothing() -> None:
    constant, rare = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = GradientSmoother(SGD([constant, rare], lr=1.0, momentum=0.0), decay=0.9)
    for step in range(6):
        constant.grad = torch.full((2,), 0.5)
        rare.grad = torch.full((2,), 3.0) if step % 3 == 2 else None
        optimizer.step()
        assert constant.grad.tolist() == pytest.approx([0.5, 0.5])
    assert rare.grad is not None
    assert rare.grad.tolist() == pytest.approx([3.0, 3.0])
    assert optimizer.state[rare]["seen"] == 2


def test_bfloat16_gradients_are_averaged_in_float32() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = GradientSmoother(SGD([weight], lr=0.1), decay=0.999)
    for _ in range(50):
        weight.grad = torch.ones(2, dtype=torch.bfloat16)
        optimizer.step()
    average = optimizer.state[weight]["average"]
    assert average.dtype == torch.float32
    np.testing.assert_allclose(average.numpy(), 1 - 0.999**50, rtol=1e-5)


@pytest.mark.parametrize(("eta", "gamma"), [(0.3, 0.55), (1.0, 0.55), (0.01, 1.0)])
def test_variance_of_the_noise(eta: float, gamma: float) -> None:
    """Variance and mean of 40,000 draws are within 5 standard errors, ``sqrt(2 / n)`` each."""
    weight = torch.nn.Parameter(torch.zeros(200, 200))
    optimizer = GradientNoise(SGD([weight], lr=1e-9), eta=eta, gamma=gamma, seed=3)
    for step in range(50):
        weight.grad = torch.full((200, 200), 7.0)
        outcome = optimizer.step()
        if step in (0, 1, 9, 49):
            variance = eta / (1 + step) ** gamma
            noise = (weight.grad - 7.0).double()
            assert float(noise.var()) == pytest.approx(variance, rel=5 * (2 / 40_000) ** 0.5)
            assert abs(float(noise.mean())) < 5 * (variance / 40_000) ** 0.5
            assert outcome.statistics["noise"] == pytest.approx(variance**0.5, rel=1e-12)


def test_noise_depends_on_seed_parameter_and_step() -> None:
    def drawn(seed: int) -> list[torch.Tensor]:
        weights = [torch.nn.Parameter(torch.zeros(5)) for _ in range(2)]
        optimizer = GradientNoise(SGD(weights, lr=1.0), seed=seed)
        found = []
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.zeros(5)
            optimizer.step()
            found += [weight.grad.clone() for weight in weights if weight.grad is not None]
        return found

    first = drawn(1)
    again = drawn(1)
    other = drawn(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({tuple(each.tolist()) for each in (*first, *other)}) == 8
    # torch's global generator is not used.
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    drawn(1)
    assert torch.equal(torch.rand(1), expected)
