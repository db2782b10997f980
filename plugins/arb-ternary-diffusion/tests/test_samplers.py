"""Samplers on Gaussian data, whose best model is known: every step is then an affine map."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from arb_ternary_diffusion.noise import Parts, alpha_bar, level, prediction_target
from arb_ternary_diffusion.noise_config import PredictionName, ScheduleName
from arb_ternary_diffusion.samplers import Predict, draw, guide

PREDICTIONS = get_args(PredictionName)
MEAN = 0.4
SPREAD = 0.3


def best_prediction(
    prediction: PredictionName, schedule: ScheduleName, mean: float = MEAN
) -> Predict:
    """Predict ``E[x0 | x_t]`` of data ``N(mean, SPREAD^2)``, expressed as ``prediction``."""

    def predicted(x_t: Tensor, time_B: Tensor) -> Tensor:
        at = level(schedule, time_B, x_t)
        excess = x_t - at.alpha * mean
        x0 = mean + at.alpha * SPREAD**2 * excess / (at.alpha**2 * SPREAD**2 + at.sigma**2)
        epsilon = at.sigma * excess / (at.alpha**2 * SPREAD**2 + at.sigma**2)
        return prediction_target(prediction, Parts(x0, epsilon), at)

    return predicted


def spread_after(schedule: ScheduleName, steps: int, eta: float) -> float:
    """Return the samples' standard deviation, by a recursion over Song et al.'s equation 12."""
    kept = [
        float(alpha_bar(schedule, torch.tensor(1 - k / steps, dtype=torch.float64)))
        for k in range(steps)
    ]
    variance = 1.0
    for number, now in enumerate(kept):
        alpha = math.sqrt(now)
        sigma = math.sqrt(1 - now)
        total = alpha**2 * SPREAD**2 + sigma**2
        x0 = alpha * SPREAD**2 / total
        epsilon = sigma / total
        if number == steps - 1:
            return math.sqrt(variance) * x0
        after = kept[number + 1]
        fresh = eta * math.sqrt((1 - after) / (1 - now) * (1 - now / after))
        factor = math.sqrt(after) * x0 + math.sqrt(1 - after - fresh**2) * epsilon
        variance = factor**2 * variance + fresh**2
    raise AssertionError


def noise(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 1, generator=torch.Generator().manual_seed(3), dtype=dtype)


def fresh(seed: int, count: int) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda: torch.randn(count, 1, generator=generator)


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_ddim_is_the_affine_map_of_its_steps(
    prediction: PredictionName, schedule: ScheduleName
) -> None:
    points = torch.tensor([[-1.0], [0.0], [2.0]])
    drawn = draw(
        best_prediction(prediction, schedule),
        points,
        prediction=prediction,
        schedule=schedule,
        steps=20,
        limit=None,
    )
    slope = float(drawn[2] - drawn[0]) / 3
    assert slope == pytest.approx(spread_after(schedule, 20, 0.0), rel=2e-4)


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
def test_ddim_converges_to_the_probability_flow(schedule: ScheduleName) -> None:
    # The flow of Gaussian data keeps (x_t - alpha mu) / std(x_t) constant, so that x_0 = mu + s
    # (x_1 - alpha_1 mu) / sqrt(alpha_1^2 s^2 + sigma_1^2).
    points = torch.tensor([[-2.0], [0.5], [1.5]], dtype=torch.float64)
    last = float(alpha_bar(schedule, torch.tensor(1.0)))
    exact = MEAN + SPREAD * (points - math.sqrt(last) * MEAN) / math.sqrt(
        last * SPREAD**2 + 1 - last
    )

    def error(steps: int) -> float:
        drawn = draw(
            best_prediction("v", schedule),
            points,
            prediction="v",
            schedule=schedule,
            steps=steps,
            limit=None,
        )
        return float((drawn - exact).abs().max())

    assert error(1600) < 0.01
    assert error(1600) == pytest.approx(error(800) / 2, rel=0.1)  # a method of first order


@pytest.mark.parametrize(("sampler", "eta"), [("ddpm", 0.0), ("ddim", 1.0), ("ddim", 0.5)])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_moments_of_samplers_that_add_noise(
    prediction: PredictionName, sampler: str, eta: float
) -> None:
    count = 40_000
    steps = 25
    drawn = draw(
        best_prediction(prediction, "cosine"),
        noise(count),
        prediction=prediction,
        schedule="cosine",
        steps=steps,
        sampler=sampler,  # type: ignore[arg-type]
        eta=eta,
        limit=None,
        fresh=fresh(4, count),
    )
    spread = spread_after("cosine", steps, 1.0 if sampler == "ddpm" else eta)
    # Error of the mean; that of the standard deviation is smaller by sqrt(2).
    error = spread / math.sqrt(count)
    assert float(drawn.mean()) == pytest.approx(MEAN, abs=5 * error)
    assert float(drawn.std()) == pytest.approx(spread, abs=4 * error)


def test_ddpm_converges_to_the_variance_of_the_data() -> None:
    def error(steps: int) -> float:
        return SPREAD - spread_after("cosine", steps, 1.0)

    assert 0 < error(2000) < 0.002
    assert error(2000) == pytest.approx(error(1000) / 2, rel=0.05)  # falls as one over the steps


def test_ddpm_is_ddim_with_eta_1() -> None:
    def drawn(sampler: str, eta: float) -> Tensor:
        return draw(
            best_prediction("v", "linear"),
            noise(50, torch.float64),
            prediction="v",
            schedule="linear",
            steps=30,
            sampler=sampler,  # type: ignore[arg-type]
            eta=eta,
            fresh=fresh(5, 50),
        )

    torch.testing.assert_close(drawn("ddpm", 0.0), drawn("ddim", 1.0), rtol=0, atol=1e-12)


def test_samples_stay_within_the_limit() -> None:
    drawn = draw(
        best_prediction("v", "cosine"),
        noise(200),
        prediction="v",
        schedule="cosine",
        steps=10,
        limit=0.5,
    )
    assert float(drawn.abs().max()) == 0.5
    free = draw(
        best_prediction("v", "cosine"),
        noise(200),
        prediction="v",
        schedule="cosine",
        steps=10,
        limit=None,
    )
    assert float(free.abs().max()) > 0.6


def test_guidance_of_weight_one_and_zero() -> None:
    one = best_prediction("v", "cosine")
    other = best_prediction("v", "cosine", mean=-0.2)
    assert guide(one, other, 1.0) is one
    assert guide(one, other, 0.0) is other


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_guidance_does_not_depend_on_the_prediction(prediction: PredictionName) -> None:
    # Guidance of two Gaussians of equal variance is a Gaussian whose mean is on the line through
    # both means.
    both = guide(
        best_prediction(prediction, "cosine", 0.2), best_prediction(prediction, "cosine", -0.1), 2.5
    )
    time = torch.linspace(0.05, 1, 40)
    expected = best_prediction(prediction, "cosine", -0.1 + 2.5 * 0.3)(noise(40), time)
    torch.testing.assert_close(both(noise(40), time), expected, rtol=1e-4, atol=1e-4)
