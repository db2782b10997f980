"""SWATS compared with the algorithm of Keskar and Socher in numpy, and on quadratics."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
import torch

from arb_ternary_orchestrator import SWATS, SWATSConfig
from arb_ternary_orchestrator.strategies.carry import carry_state

SHAPES = [(4, 3), (5,)]
BETA1 = 0.9
BETA2 = 0.99
EPS = 1e-8
LR = 0.01


def gradient(step: int, weights: list[np.ndarray]) -> list[np.ndarray]:
    """Return noisy gradients of a quadratic with curvatures from 0.2 to 2."""
    random = np.random.default_rng(step)
    curvatures = [np.linspace(0.2, 2, w.size).reshape(w.shape) for w in weights]
    return [
        c * w + 0.05 * random.standard_normal(w.shape)
        for c, w in zip(curvatures, weights, strict=True)
    ]


def restated(
    steps: int, threshold: float, least: int
) -> tuple[list[np.ndarray], int | None, float | None]:
    """Run the paper's algorithm on all parameters as one vector, in float64."""
    weights = [np.full(shape, 1.5) for shape in SHAPES]
    split = np.cumsum([weight.size for weight in weights])[:-1]
    w = np.concatenate([weight.ravel() for weight in weights])
    m = np.zeros_like(w)
    a = np.zeros_like(w)
    v = np.zeros_like(w)
    lam = 0.0
    rate = None
    switched = None
    for k in range(1, steps + 1):
        parts = [
            part.reshape(shape) for part, shape in zip(np.split(w, split), SHAPES, strict=True)
        ]
        g = np.concatenate([each.ravel() for each in gradient(k, parts)])
        if rate is not None:
            v = BETA1 * v + g
            w = w - (1 - BETA1) * rate * v
            continue
        m = BETA1 * m + (1 - BETA1) * g
        a = BETA2 * a + (1 - BETA2) * g * g
        p = -LR * math.sqrt(1 - BETA2**k) / (1 - BETA1**k) * m / (np.sqrt(a) + EPS)
        w = w + p
        if p @ g != 0:
            gamma = (p @ p) / -(p @ g)
            lam = BETA2 * lam + (1 - BETA2) * gamma
            estimate = lam / (1 - BETA2**k)
            if k > max(1, least) and abs(estimate - gamma) < threshold and estimate > 0:
                rate = estimate
                switched = k
    return (
        [part.reshape(shape) for part, shape in zip(np.split(w, split), SHAPES, strict=True)],
        switched,
        rate,
    )


def run(
    optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter], first: int, last: int
) -> int | None:
    """Take steps ``first`` to ``last``; return the one at which the first group switched."""
    switched = None
    for step in range(first, last + 1):
        values = [weight.detach().double().numpy() for weight in weights]
        for weight, found in zip(weights, gradient(step, values), strict=True):
            weight.grad = torch.from_numpy(found).to(weight.dtype)
        optimizer.step()
        if switched is None and optimizer.param_groups[0]["phase"] == "sgd":
            switched = step
    return switched


def start(
    dtype: torch.dtype = torch.float64, **options: float
) -> tuple[list[torch.nn.Parameter], SWATS]:
    weights = [torch.nn.Parameter(torch.full(shape, 1.5, dtype=dtype)) for shape in SHAPES]
    given = {
        "adam_lr": LR,
        "beta2": BETA2,
        "switch_threshold": 1e-3,
        "min_steps_before_switch": 20,
        **options,
    }
    return weights, SWATS(weights, config=SWATSConfig(**given))  # type: ignore[arg-type]


@pytest.mark.parametrize(("threshold", "least"), [(1e-3, 20), (1e-2, 0), (1e-9, 1000)])
def test_swats_matches_the_paper(threshold: float, least: int) -> None:
    weights, optimizer = start(switch_threshold=threshold, min_steps_before_switch=least)
    switched = run(optimizer, weights, 1, 120)
    expected, when, rate = restated(120, threshold, least)
    assert switched == when
    assert (when is None) == (least == 1000)
    for weight, value in zip(weights, expected, strict=True):
        np.testing.assert_allclose(weight.detach().numpy(), value, rtol=1e-5)
    if rate is not None:
        assert optimizer.param_groups[0]["sgd_rate"] * LR == pytest.approx(rate, rel=1e-5)


def test_code_of_the_guide_runs() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = SWATS(
        model.parameters(),
        config=SWATSConfig(adam_lr=1e-3, switch_threshold=1e-9, min_steps_before_switch=1000),
    )
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert model.weight.grad is None


@pytest.mark.parametrize("curvature", [0.25, 4.0, 100.0])
def test_projected_rate_on_a_quadratic(curvature: float) -> None:
    """With one curvature ``h`` and one start everywhere Adam's steps lie along the gradient ``h
    w``. While its sign stays Adam moves each weight by ``lr``, so that SGD takes the same way with
    the rate ``lr / (h w)``.
    """
    lr = 0.01
    weight = torch.nn.Parameter(torch.full((6,), 10.0, dtype=torch.float64))
    config = SWATSConfig(adam_lr=lr, beta1=0.0, beta2=0.5, switch_threshold=0.1 * lr / curvature)
    optimizer = SWATS([weight], config=attrs.evolve(config, min_steps_before_switch=10))
    for _ in range(12):
        before = weight.detach().clone()
        weight.grad = curvature * before
        optimizer.step()
    (group,) = optimizer.param_groups
    assert group["phase"] == "sgd"
    assert group["sgd_rate"] * lr == pytest.approx(lr / (curvature * 10.0), rel=0.05)
    # Without momentum a step of SGD then is the step that Adam took.
    assert float((before - weight.detach())[0]) == pytest.approx(lr, rel=0.05)


def test_found_rate_converges_on_a_quadratic() -> None:
    """Gradient descent on curvatures up to ``h`` needs a rate below ``2 / h``."""
    curvatures = torch.linspace(0.5, 2.0, 8, dtype=torch.float64)
    weight = torch.nn.Parameter(torch.full((8,), 2.0, dtype=torch.float64))
    config = SWATSConfig(adam_lr=0.05, beta2=0.9, switch_threshold=0.02, min_steps_before_switch=15)
    optimizer = SWATS([weight], config=config)
    for _ in range(400):
        weight.grad = curvatures * weight.detach()
        optimizer.step()
    (group,) = optimizer.param_groups
    assert group["phase"] == "sgd"
    assert 0 < group["sgd_rate"] * 0.05 < 2 / 2.0
    assert float((curvatures * weight.detach() ** 2).sum()) < 1e-3


def test_groups_switch_separately_and_drop_adam_state() -> None:
    soft, hard = (torch.nn.Parameter(torch.full((4,), 3.0)) for _ in range(2))
    config = SWATSConfig(adam_lr=0.01, beta2=0.9, switch_threshold=1e-3, min_steps_before_switch=10)
    groups = [{"params": [soft]}, {"params": [hard], "min_steps_before_switch": 30}]
    optimizer = SWATS(groups, config=config)
    phases = []
    for _ in range(60):
        soft.grad = 0.5 * soft.detach()
        hard.grad = 50.0 * hard.detach()
        outcome = optimizer.step()
        phases.append(tuple(group["phase"] for group in optimizer.param_groups))
        assert outcome.statistics == {"sgd_groups": phases[-1].count("sgd")}
    assert phases[9] == ("adam", "adam")
    assert ("sgd", "adam") in phases
    assert phases[-1] == ("sgd", "sgd")
    first, second = (group["sgd_rate"] for group in optimizer.param_groups)
    assert first / second == pytest.approx(100, rel=0.1)
    assert all(set(state) == {"momentum"} for state in optimizer.state.values())


def test_schedule_scales_the_rate_after_the_switch() -> None:
    weights, optimizer = start()
    run(optimizer, weights, 1, 60)
    (group,) = optimizer.param_groups
    assert group["phase"] == "sgd"
    for state in optimizer.state.values():
        state["momentum"].zero_()
    before = weights[1].detach().clone()
    group["lr"] = LR / 4
    weights[0].grad = None
    weights[1].grad = torch.ones(5, dtype=torch.float64)
    optimizer.step()
    moved = before - weights[1].detach()
    torch.testing.assert_close(
        moved, torch.full_like(moved, 0.1 * group["sgd_rate"] * LR / 4), rtol=1e-9, atol=0
    )


def test_negative_rate_is_never_used() -> None:
    """After the gradient has turned, momentum carries Adam against it: ``p.g`` is positive."""
    weight = torch.nn.Parameter(torch.zeros(3))
    config = SWATSConfig(beta1=0.99, beta2=0.5, switch_threshold=1e9, min_steps_before_switch=12)
    optimizer = SWATS([weight], config=config)
    for step in range(16):
        weight.grad = torch.full((3,), 1.0 if step < 10 else -0.01)
        optimizer.step()
    (group,) = optimizer.param_groups
    assert group["projection"] < 0
    assert group["phase"] == "adam"


def test_zero_gradients_and_zero_rate_are_ignored() -> None:
    weights, optimizer = start()
    optimizer.step()
    (group,) = optimizer.param_groups
    group["lr"] = 0.0
    run(optimizer, weights, 1, 3)
    assert (group["projections"], group["projection"]) == (0, 0.0)
    assert all(bool((weight == 1.5).all()) for weight in weights)


@pytest.mark.parametrize("stop", [5, 40])
def test_loading_state_keeps_the_phase(stop: int) -> None:
    weights, optimizer = start()
    run(optimizer, weights, 1, stop)
    other = SWATS(
        weights, config=SWATSConfig(adam_lr=LR / 2, beta2=BETA2, min_steps_before_switch=7)
    )
    carry_state(optimizer, other)
    (group,) = other.param_groups
    (before,) = optimizer.param_groups
    assert (group["lr"], group["min_steps_before_switch"]) == (LR / 2, 7)
    assert all(
        group[name] == before[name]
        for name in ("phase", "steps", "projection", "projections", "sgd_rate")
    )
    assert group["phase"] == ("adam" if stop == 5 else "sgd")
    values = [weight.detach().clone() for weight in weights]
    run(other, weights, stop + 1, stop + 1)
    moved = [value - weight.detach() for value, weight in zip(values, weights, strict=True)]
    for weight, value in zip(weights, values, strict=True):
        weight.data.copy_(value)
    run(optimizer, weights, stop + 1, stop + 1)
    for half, value, weight in zip(moved, values, weights, strict=True):
        torch.testing.assert_close(2 * half, value - weight.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stop", [5, 24, 40])
def test_resumed_swats_continues_bitwise(stop: int, dtype: torch.dtype) -> None:
    weights, optimizer = start(dtype)
    switched = run(optimizer, weights, 1, stop)
    state = optimizer.state_dict()
    kept = [weight.detach().clone() for weight in weights]
    others, other = start(dtype)
    for weight, value in zip(others, kept, strict=True):
        weight.data.copy_(value)
    other.load_state_dict(state)
    run(optimizer, weights, stop + 1, 60)
    run(other, others, stop + 1, 60)
    assert (switched is None) == (stop == 5)
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    assert other.param_groups[0]["sgd_rate"] == optimizer.param_groups[0]["sgd_rate"]
