"""AdaGC compared with the algorithm of Wang et al. in numpy, and on spikes with a known bound."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import inner_optimizers, may_refuse
from arb_ternary_orchestrator import AdaGC

SHAPES = [(4, 3), (5,), (1,)]


def gradients(step: int) -> list[np.ndarray]:
    random = np.random.default_rng(step)
    spike = [1.0, 1.0, 1.0]
    spike[step % 3] = 1000.0 if step in (17, 18, 31, 45) else 1.0
    return [
        (random.standard_normal(shape) * (0.2 + index) * scale).astype(np.float32)
        for index, (shape, scale) in enumerate(zip(SHAPES, spike, strict=True))
    ]


def restated(
    steps: int, rel: float, total: float, beta: float, warmup: int
) -> tuple[list[np.ndarray], list[float]]:
    """Return the clipped gradients of the last step and the averages, in float64."""
    averages: list[float] = []
    clipped: list[np.ndarray] = []
    for step in range(steps):
        found = [each.astype(np.float64) for each in gradients(step)]
        if step < warmup:
            norm = math.sqrt(sum(float((each**2).sum()) for each in found))
            clipped = [each * min(total / norm, 1) for each in found]
            norms = [float(np.linalg.norm(each)) for each in clipped]
            averages = (
                [min(pair) for pair in zip(averages, norms, strict=True)] if averages else norms
            )
        else:
            clipped = [
                each * min(rel * average / float(np.linalg.norm(each)), 1)
                for each, average in zip(found, averages, strict=True)
            ]
            averages = [
                beta * average + (1 - beta) * float(np.linalg.norm(each))
                for each, average in zip(clipped, averages, strict=True)
            ]
    return clipped, averages


def start(**options: Any) -> tuple[list[torch.nn.Parameter], AdaGC]:
    """SGD with rate 1 subtracts the clipped gradient from the weights."""
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    return weights, AdaGC(SGD(weights, lr=1.0, momentum=0.0), **options)


def step(optimizer: AdaGC, weights: list[torch.nn.Parameter], found: list[np.ndarray]) -> Any:
    for weight, gradient in zip(weights, found, strict=True):
        weight.grad = torch.from_numpy(gradient.copy())
    return optimizer.step()


@pytest.mark.parametrize("steps", [1, 8, 9, 20, 60])
def test_adagc_matches_the_paper(steps: int) -> None:
    weights, optimizer = start(threshold=1.5, decay=0.9, warmup=8, max_norm=0.7)
    for index in range(steps - 1):
        step(optimizer, weights, gradients(index))
    before = [weight.detach().clone() for weight in weights]
    step(optimizer, weights, gradients(steps - 1))
    clipped, averages = restated(steps, 1.5, 0.7, 0.9, 8)
    for weight, start_of_step, expected, average in zip(
        weights, before, clipped, averages, strict=True
    ):
        assert weight.grad is not None
        np.testing.assert_allclose(weight.grad.numpy(), expected, rtol=2e-5)
        np.testing.assert_allclose(
            (start_of_step - weight.detach()).numpy(), expected, rtol=1e-3, atol=1e-5
        )
        assert optimizer.state[weight]["average"] == pytest.approx(average, rel=1e-5)


@pytest.mark.parametrize("factor", [1.05, 2.0, 10.0])
def test_large_spike_is_clipped_to_threshold_times_baseline(
    factor: float,
) -> None:
    """Gradients of norm 0.3 have the average 0.3, and ``factor`` times that is allowed."""
    weight = torch.nn.Parameter(torch.zeros(9))
    optimizer = AdaGC(SGD([weight], lr=1.0, momentum=0.0), threshold=factor, warmup=5)
    for _ in range(30):
        weight.grad = torch.full((9,), 0.1)
        assert optimizer.step().statistics["clipped"] == 0
    weight.grad = torch.full((9,), 100.0)
    outcome = optimizer.step()
    assert float(weight.grad.norm()) == pytest.approx(factor * 0.3, rel=1e-6)
    assert outcome.statistics["clipped"] == 1
    assert outcome.grad_norm == pytest.approx(300.0, rel=1e-6)


def test_spike_does_not_affect_other_parameters() -> None:
    weights, optimizer = start(warmup=2, max_norm=100.0, threshold=3.0)
    quiet = [np.full(shape, 0.01, dtype=np.float32) for shape in SHAPES]
    for _ in range(4):
        step(optimizer, weights, quiet)
    step(optimizer, weights, [quiet[0], quiet[1] * 1000, quiet[2]])
    for weight, expected in zip(weights, [quiet[0], quiet[1] * 3, quiet[2]], strict=True):
        assert weight.grad is not None
        np.testing.assert_allclose(weight.grad.numpy(), expected, rtol=1e-6)


def test_spike_in_warmup_does_not_set_the_baseline() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = AdaGC(SGD([weight], lr=1.0), warmup=3, max_norm=1.0)
    for size in (0.1, 1000.0, 0.2):
        weight.grad = torch.full((4,), size)
        optimizer.step()
    assert optimizer.state[weight]["average"] == pytest.approx(0.2, rel=1e-6)


def test_zero_gradients_are_ignored_and_warmup_is_per_parameter() -> None:
    """In a product whose first factor is zero the second factor has a gradient of zero."""
    early, late = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    optimizer = AdaGC(SGD([early, late], lr=1.0), warmup=2, threshold=2.0)
    for _ in range(5):
        early.grad = torch.full((4,), 0.1)
        late.grad = torch.zeros(4)
        optimizer.step()
    assert late not in optimizer.state
    late.grad = torch.full((4,), 0.2)
    optimizer.step()
    assert late.grad.tolist() == pytest.approx([0.2] * 4)
    assert optimizer.state[late] == {"seen": 1, "average": pytest.approx(0.4)}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_gradient_drops_the_whole_update(value: float) -> None:
    weights, optimizer = start(warmup=2)
    for index in range(5):
        step(optimizer, weights, gradients(index))
    before = [weight.detach().clone() for weight in weights]
    averages = {weight: dict(optimizer.state[weight]) for weight in weights}
    bad = gradients(5)
    bad[1][2] = value
    assert may_refuse(optimizer)
    for weight, gradient in zip(weights, bad, strict=True):
        weight.grad = torch.from_numpy(gradient)
    assert not optimizer.may_step()
    outcome = optimizer.step()
    assert (outcome.stepped, outcome.skipped) == (False, True)
    assert not math.isfinite(outcome.grad_norm)
    assert all(weight.grad is None for weight in weights)
    assert all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))
    assert {weight: dict(optimizer.state[weight]) for weight in weights} == averages
    step(optimizer, weights, gradients(5))
    assert optimizer.may_step()


def test_adagc_wraps_only_float_optimizers() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ConfigError, match=r"wraps a torch.optim.Optimizer, not a list"):
        AdaGC([weight])  # type: ignore[arg-type]
    packed = torch.nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)
    with pytest.raises(
        ConfigError, match=r"AdaGC: param group 0, parameter 1: torch.int32.*cast votes in backward"
    ):
        AdaGC(SGD([weight, packed], lr=1.0))
    wrapped = AdaGC(torch.optim.AdamW([weight]))
    assert list(inner_optimizers(wrapped)) == [wrapped, wrapped.inner]
    assert wrapped.param_groups is wrapped.inner.param_groups
