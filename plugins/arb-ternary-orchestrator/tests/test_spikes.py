"""The spike detector compared with numpy and scipy, and its false positive rate."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from arb_ternary_orchestrator.spikes import SpikeDetector

WARMUP = 10


def restated(values: NDArray[np.float64], k: float, decay: float = 0.99) -> NDArray[np.bool_]:
    """Return which values of each row are spikes, with all weights written out."""
    rows, length = values.shape
    entered = np.array(values)
    spikes = np.zeros((rows, length), bool)
    for n in range(2, length):
        share = decay ** np.arange(n)[::-1]
        share /= share.sum()
        squares = (share**2).sum()
        cubes = (share**3).sum()
        mean = entered[:, :n] @ share
        biased = np.maximum(entered[:, :n] ** 2 @ share - mean**2, 0.0)
        deviation = np.sqrt(biased / (1 - squares))
        degrees = (1 - squares) ** 2 / (squares - 2 * cubes + squares**2)
        limit = mean + stats.t.isf(stats.norm.sf(k), degrees) * math.sqrt(1 + squares) * deviation
        above = values[:, n] > limit
        entered[:, n] = np.where(above, limit, values[:, n])
        spikes[:, n] = above & (n >= WARMUP)
    return spikes


def detected(values: NDArray[np.float64], k: float) -> list[bool]:
    detector = SpikeDetector(k, warmup=WARMUP)
    return [detector.observe(float(value)) for value in values]


@pytest.mark.parametrize("k", [2.0, 3.0, 4.0])
def test_detector_matches_numpy(k: float) -> None:
    generator = np.random.default_rng(3)
    values = np.concatenate(
        [generator.normal(2.5, 0.1, (12, 150)), 2.5 + 0.1 * generator.standard_t(3, (12, 150))]
    )
    assert [detected(row, k) for row in values] == restated(values, k).tolist()


@pytest.mark.parametrize("k", [3.0, 4.0])
def test_false_positive_rate_is_that_of_k(k: float) -> None:
    generator = np.random.default_rng(4)
    lengths = generator.integers(100, 301, 10_000)
    judged = np.arange(300) < lengths[:, None]
    judged[:, :WARMUP] = False
    spikes = restated(generator.normal(2.5, 0.1, (10_000, 300)), k)
    tail = stats.norm.sf(k)
    for first, last in ((WARMUP, 300), (WARMUP, 30), (WARMUP, 100), (100, 300)):
        trials = int(judged[:, first:last].sum())
        count = int((spikes & judged)[:, first:last].sum())
        # 99.99 % of the binomial distribution of independent trials of the closed form.
        low, high = stats.binom.interval(0.9999, trials, tail)
        assert low <= count <= high, (first, last, count / trials, tail)
    if k == 3:
        shares = ((spikes & judged)[:, :100].sum(1) >= 3).mean()
        assert shares <= stats.binom.isf(1e-4, 10_000, stats.binom.sf(2, 90, tail)) / 10_000


def test_spike_hardly_moves_the_limit() -> None:
    detector = SpikeDetector()
    for value in np.random.default_rng(5).normal(2.0, 0.1, 300):
        detector.observe(float(value))
    detector.observe(2.0)
    before = detector.limit
    assert detector.observe(2000.0)
    assert not detector.observe(2.0)
    # Clipped at three deviations it adds 0.01 * (9 - 1) to the variance, and 0.03 deviations to the
    # mean.
    assert detector.limit - before < 0.1 * (3 * 0.5 * 0.1 + 0.05)
    assert detector.observe(2.6)


@pytest.mark.parametrize("height", [6.0, 30.0, 1000.0])
def test_lasting_level_becomes_the_usual_one(height: float) -> None:
    values = np.random.default_rng(6).normal(2.0, 0.1, 900)
    values[300:] += 0.1 * height
    found = np.flatnonzero(detected(values, 3.0))
    found = found[found >= 300]
    assert found[0] == 300
    # Each clipped value widens the deviation by about 4 %: ln(1000) / 0.04 steps for the highest,
    # and fewer as the mean moves too.
    assert found[-1] < 300 + 25 + math.log(height) / 0.04
    assert detected(values, 3.0) == restated(values[None], 3.0)[0].tolist()


def test_constant_sequence() -> None:
    detector = SpikeDetector()
    assert not any(detector.observe(2.0) for _ in range(50))
    assert not detector.observe(2.0 * (1 + 1e-7))
    assert detector.observe(3.0)
    later = [detector.observe(3.0) for _ in range(600)]
    assert later[0]
    assert not any(later[-100:])


def test_zeros_have_no_scale() -> None:
    detector = SpikeDetector()
    assert not any(detector.observe(0.0) for _ in range(50))
    assert not detector.observe(5.0)
    assert detector.observe(50.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_value_is_a_spike_without_statistics(value: float) -> None:
    detector = SpikeDetector()
    other = SpikeDetector()
    for each in np.random.default_rng(7).normal(size=30):
        detector.observe(float(each))
        other.observe(float(each))
    assert detector.observe(value)
    detector.observe(0.0)
    other.observe(0.0)
    assert (detector.limit, detector.baseline) == (other.limit, other.baseline)


def test_warmup_clips_without_spikes() -> None:
    detector = SpikeDetector(warmup=20)
    values = [1.0, 1.2, 0.8, 1.1, 0.9, 1.0, 1.1, 0.9]
    assert not any(detector.observe(value) for value in values)
    assert not detector.observe(1e6)
    limit = detector.limit
    assert detector.baseline is None
    detector.observe(1.0)
    assert detector.limit < 3 * limit


def test_count_and_score() -> None:
    detector = SpikeDetector(memory=100)
    for value in np.random.default_rng(8).normal(size=60).clip(-2, 2):
        detector.observe(float(value))
    assert detector.score == 0
    assert detector.observe(99.0)
    for _ in range(4):
        detector.observe(0.0)
    assert detector.observe(99.0)
    detector.observe(0.0)
    assert detector.score == pytest.approx(0.9**6 + 0.9**1)
    assert [detector.count(window) for window in (1, 2, 6, 7, 100)] == [0, 1, 1, 2, 2]
    for _ in range(100):
        detector.observe(0.0)
    assert detector.count(100) == 0


def test_state_roundtrip() -> None:
    first = SpikeDetector(2.0)
    second = SpikeDetector(2.0)
    values = np.random.default_rng(9).standard_t(3, 200).tolist()
    for value in values[:120]:
        first.observe(value)
    second.load_state_dict(first.state_dict())
    assert [first.observe(value) for value in values[120:]] == [
        second.observe(value) for value in values[120:]
    ]
    assert first.state_dict() == second.state_dict()
