"""Levels of noise against published formulas, and conversions between predictions."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch

from arb_ternary_diffusion.noise import (
    Parts,
    add_noise,
    alpha_bar,
    level,
    prediction_target,
    split_noise,
)
from arb_ternary_diffusion.noise_config import PredictionName, ScheduleName

PREDICTIONS = get_args(PredictionName)
SCHEDULES = get_args(ScheduleName)


def test_cosine_matches_nichol_and_dhariwal() -> None:
    time = np.linspace(0, 0.99, 34)
    angle = (time + 0.008) / 1.008 * math.pi / 2
    expected = np.cos(angle) ** 2 / math.cos(0.008 / 1.008 * math.pi / 2) ** 2
    np.testing.assert_allclose(
        alpha_bar("cosine", torch.from_numpy(time)).numpy(), expected, rtol=1e-13
    )


def test_linear_is_the_limit_of_ho_et_al() -> None:
    def product(steps: int) -> np.ndarray:
        return np.cumprod(1 - np.linspace(1e-4, 0.02, steps) * 1000 / steps)

    def error(steps: int) -> float:
        time = torch.arange(1, steps + 1, dtype=torch.float64) / steps
        return float(np.abs(np.log(product(steps) / alpha_bar("linear", time).numpy())).max())

    assert error(1000) < 0.08  # with their number of steps
    # The error falls with the number of steps.
    assert error(16_000) == pytest.approx(error(1000) / 16, rel=0.05)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_runs_from_sample_to_noise(schedule: ScheduleName) -> None:
    kept = alpha_bar(schedule, torch.linspace(0, 1, 1001, dtype=torch.float64))
    assert kept[0] == 1
    assert (kept.diff() <= 0).all()
    assert 0 < kept[-1] < 1e-4


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_level_keeps_the_variance(schedule: ScheduleName) -> None:
    time = torch.tensor([0.0, 0.1, 0.5, 1.0])
    at = level(schedule, time, torch.zeros(4, 1, 3, 2))
    assert at.alpha.shape == at.sigma.shape == (4, 1, 1, 1)
    assert at.alpha.dtype == torch.float32
    torch.testing.assert_close(at.alpha.square() + at.sigma.square(), torch.ones(4, 1, 1, 1))
    torch.testing.assert_close(
        at.alpha.flatten().double().square(), alpha_bar(schedule, time), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_conversions_are_inverse(prediction: PredictionName, schedule: ScheduleName) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = Parts(*torch.randn(2, 6, 2, 3, generator=generator, dtype=torch.float64))
    at = level(schedule, torch.tensor([0.01, 0.1, 0.3, 0.5, 0.9, 1.0]), parts.x0)
    found = split_noise(
        prediction, prediction_target(prediction, parts, at), add_noise(parts, at), at
    )
    torch.testing.assert_close(found.x0, parts.x0, rtol=0, atol=1e-11)
    torch.testing.assert_close(found.epsilon, parts.epsilon, rtol=0, atol=1e-11)


def test_v_is_the_velocity_of_salimans_and_ho() -> None:
    # v is the derivative of x = cos(phi) x0 + sin(phi) epsilon by phi.
    x0 = 0.7
    epsilon = -1.9
    phi = 0.4
    step = 1e-6
    at = level("cosine", torch.tensor([0.0]), torch.zeros(1, 1))
    at = at._replace(
        alpha=torch.tensor(math.cos(phi)).double(), sigma=torch.tensor(math.sin(phi)).double()
    )
    v = float(
        prediction_target("v", Parts(torch.tensor(x0).double(), torch.tensor(epsilon).double()), at)
    )
    ahead, behind = (math.cos(p) * x0 + math.sin(p) * epsilon for p in (phi + step, phi - step))
    assert v == pytest.approx((ahead - behind) / (2 * step), rel=1e-6)
