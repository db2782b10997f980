from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from arb_ternary_orchestrator.telemetry import Observation, Telemetry


def fed(losses: Any, start: int = 1, **options: Any) -> Telemetry:
    telemetry = Telemetry(**options)
    for step, loss in enumerate(losses, start=start):
        telemetry.observe(Observation(step, float(loss)))
    return telemetry


def test_trend_is_the_least_squares_line() -> None:
    generator = np.random.default_rng(1)
    losses = 4 - 0.01 * np.arange(90) + generator.normal(0, 0.1, 90)
    telemetry = Telemetry(window=30)
    for step, loss in enumerate(losses, start=1):
        telemetry.observe(Observation(step, float(loss)))
        if step < 5:
            assert telemetry.trend is None
            continue
        steps = np.arange(1, step + 1)[-30:]
        recent = losses[:step][-30:]
        (slope, _), covariance = np.polyfit(steps, recent, 1, cov=True)
        trend = telemetry.trend
        assert trend is not None
        assert trend.slope == pytest.approx(slope, rel=1e-8)
        assert trend.error == pytest.approx(math.sqrt(covariance[0, 0]), rel=1e-8)
        assert trend.significance == pytest.approx(slope / math.sqrt(covariance[0, 0]), rel=1e-8)
        residual = recent - np.polyval(np.polyfit(steps, recent, 1), steps)
        assert trend.noise == pytest.approx(
            math.sqrt((residual**2).sum() / (len(recent) - 2)), rel=1e-8
        )
        assert trend.fall == pytest.approx(-slope * (steps[-1] - steps[0]), rel=1e-8)


def test_trend_accounts_for_missing_steps() -> None:
    telemetry = Telemetry()
    for step in (1, 2, 3, 10, 20, 40):
        telemetry.observe(Observation(step, 5 - 0.1 * step))
    assert telemetry.trend is not None
    assert telemetry.trend.slope == pytest.approx(-0.1, rel=1e-12)


def test_mean_and_variance_of_the_loss() -> None:
    losses = np.random.default_rng(2).normal(3, 0.2, 250)
    telemetry = fed(losses, decay=0.98)
    share = 0.98 ** np.arange(250)[::-1]
    share /= share.sum()
    mean = share @ losses
    assert telemetry.ema == pytest.approx(mean, rel=1e-12)
    assert telemetry.numbers()["variance"] == pytest.approx(
        share @ (losses - mean) ** 2 / (1 - share @ share), rel=1e-9
    )
    assert (telemetry.best, telemetry.best_step) == (losses.min(), losses.argmin() + 1)


def test_nonfinite_loss_enters_no_statistics() -> None:
    telemetry = fed([3.0, 2.0, 2.5, 2.4, 2.2, 2.1])
    other = fed([3.0, 2.0, 2.5, 2.4, 2.2, 2.1])
    telemetry.observe(Observation(7, math.nan))
    assert math.isnan(telemetry.last.loss)
    assert (telemetry.ema, telemetry.numbers()["variance"], telemetry.trend) == (
        other.ema,
        other.numbers()["variance"],
        other.trend,
    )
    assert telemetry.best == 2.0
    assert telemetry.phase == "unstable"


def test_nothing_is_known_before_the_first_step() -> None:
    telemetry = Telemetry()
    assert (telemetry.ema, telemetry.numbers()["variance"], telemetry.trend, telemetry.phase) == (
        None,
        None,
        None,
        "warm-up",
    )
    assert telemetry.numbers()["best"] is None


def test_flip_rates() -> None:
    telemetry = Telemetry(weights={"blocks.0.up": 4096, "blocks.0.down": 1024})
    seen = Observation(
        1,
        2.0,
        grad_norm=0.5,
        modules={"blocks": 0.4},
        update_ratio=0.001,
        lr=0.01,
        flips={"blocks.0.up": 64},
    )
    telemetry.observe(seen)
    numbers = telemetry.numbers()
    assert numbers["flip_rates"] == {"blocks.0.up": 1 / 64}
    assert telemetry.flip_rate == 1 / 64, "of the modules whose flips were counted"
    assert numbers["module_grad_norms"] == {"blocks": 0.4}
    assert (numbers["grad_norm"], numbers["update_ratio"], numbers["lr"]) == (0.5, 0.001, 0.01)
    json.dumps(numbers, allow_nan=False)


def test_flip_rate_is_that_of_all_trits_of_the_last_step() -> None:
    telemetry = Telemetry(weights={"up": 300, "down": 100})
    assert telemetry.flip_rate is None
    telemetry.observe(Observation(1, 2.0, flips={"up": 3, "down": 5}))
    assert telemetry.flip_rate == 8 / 400
    telemetry.observe(Observation(2, 2.0))
    assert telemetry.flip_rate is None
    coarse = Telemetry(weights={"up": 300, "down": 100}, without_memory=["up"])
    coarse.observe(Observation(1, 2.0, flips={"up": 250, "down": 5}))
    assert coarse.flip_rate == 5 / 100
    coarse.observe(Observation(2, 2.0, flips={"up": 250}))
    assert coarse.flip_rate is None


def zigzag(count: int, slope: float, noise: float) -> np.ndarray[Any, Any]:
    """Return a line plus a residual of alternating sign."""
    steps = np.arange(count)
    return 10 + slope * steps + noise * (-1.0) ** steps


PLAN = {"warmup_steps": 20, "planned_steps": 1000}
SIGMA = 0.1
#: Standard error of the slope over 100 steps of noise SIGMA.
ERROR = SIGMA / math.sqrt(100**3 / 12)


@pytest.mark.parametrize(
    ("losses", "start", "phase"),
    [
        (zigzag(4, -0.1, 0.0), 500, "warm-up"),
        (zigzag(20, -0.1, SIGMA), 1, "warm-up"),
        (zigzag(21, -0.1, SIGMA), 1, "converging"),
        (zigzag(100, 3.5 * ERROR, SIGMA), 500, "unstable"),
        (zigzag(100, 2.5 * ERROR, SIGMA), 500, "plateau"),
        (zigzag(100, -1.5 * ERROR, SIGMA), 500, "plateau"),
        (zigzag(99, -1.5 * ERROR, SIGMA), 500, "mid"),
        (zigzag(100, -2.5 * ERROR, SIGMA), 500, "mid"),
        (zigzag(100, -2.5 * ERROR, SIGMA), 101, "early"),
        (zigzag(100, -2.5 * ERROR, SIGMA), 102, "mid"),
        (zigzag(100, -2.5 * ERROR, SIGMA), 701, "mid"),
        (zigzag(100, -2.5 * ERROR, SIGMA), 702, "late"),
        # The fall over the window against twice the noise.
        (zigzag(100, -1.9 * SIGMA / 99, SIGMA), 500, "mid"),
        (zigzag(100, -2.1 * SIGMA / 99, SIGMA), 500, "converging"),
        (zigzag(100, 0.0, 0.0), 500, "plateau"),
        ([*zigzag(60, -1.0, 0.1), math.inf, *zigzag(99, -1.0, 0.1)], 500, "unstable"),
        ([*zigzag(60, -1.0, 0.1), math.inf, *zigzag(100, -1.0, 0.1)], 500, "converging"),
    ],
)
def test_phases_at_their_limits(losses: Any, start: int, phase: str) -> None:
    assert fed(losses, start, window=100, **PLAN).phase == phase


def test_no_step_is_early_or_late_without_a_plan() -> None:
    assert fed(zigzag(100, -2.5 * ERROR, SIGMA), 1, window=100).phase == "mid"


def test_state_roundtrip() -> None:
    losses = np.random.default_rng(3).normal(3, 0.2, 80).tolist()
    first = fed([*losses[:50], math.nan], window=30)
    second = Telemetry(window=30)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for telemetry in (first, second):
        for step, loss in enumerate(losses[50:], start=52):
            telemetry.observe(Observation(step, loss, grad_norm=1.0, flips={"up": 3}))
    assert first.state_dict() == second.state_dict()
    assert first.numbers() == second.numbers()
