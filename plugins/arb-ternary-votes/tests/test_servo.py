"""The threshold servo: exact arithmetic, and its mean if flips are rare."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary_votes.servo import exact_threshold, level_of, next_level, whole_threshold

LEVELS = st.integers(0, 28608)


@pytest.mark.parametrize("threshold", range(1, 128))
def test_a_whole_threshold_is_its_levels_threshold_in_every_step(threshold):
    level = level_of(threshold)
    assert 0 <= level <= 28608 < 2**15
    assert exact_threshold(level) == threshold << 16
    assert {whole_threshold(level, step, 127) for step in range(50)} == {threshold}


def test_an_octave_has_4096_levels_and_grows_with_each():
    thresholds = [exact_threshold(level) for level in range(28609)]
    assert all(a < b for a, b in pairwise(thresholds))
    assert all(thresholds[level + 4096] == 2 * thresholds[level] for level in range(28609 - 4096))


@given(level=LEVELS, start=st.integers(0, 1 << 40))
def test_mean_threshold_is_that_of_the_level(level, start):
    used = [whole_threshold(level, start + step, 127) for step in range(1024)]
    exact = exact_threshold(level) / 65536
    assert set(used) <= {int(exact), int(exact) + 1}
    # Denjoy and Koksma: as many steps as a convergent's denominator are off by at most 2, the
    # variation of what is summed. Denominators of 40503 / 65536 are 233, 89 and 3, and 1024 = 4 *
    # 233 + 89 + 3.
    assert sum(used) / 1024 == pytest.approx(exact, abs=(4 + 1 + 1) * 2 / 1024)


@given(
    level=LEVELS,
    flips=st.integers(0, 1 << 20),
    elements=st.integers(1, 1 << 20),
    share=st.floats(1e-6, 1.0),
    gain=st.floats(1 / 256, 1.0),
)
def test_a_level_moves_by_the_relative_error_in_octaves(level, flips, elements, share, gain):
    after = next_level(level, flips, elements, share, gain=gain, dead_band=0.0, largest=127)
    error = min(Fraction(flips) / (elements * Fraction(share)), Fraction(8)) - 1
    expected = min(max(level + 4096 * gain * error, 0), 28608)
    # Rounded: the share to 2**-32, the error to 1/256, the gain to 1/4096, the sum to one level.
    bound = 1.5 + 16 * gain * (0.5 + 256 * 8 * 2.0**-33 / share) + 4
    assert abs(after - expected) <= bound


@pytest.mark.parametrize(
    ("flips", "moved"), [(90, False), (89, True), (110, False), (111, True), (0, True)]
)
def test_an_error_within_the_dead_band_moves_nothing(flips, moved):
    after = next_level(20000, flips, 1000, 0.1, gain=0.0625, dead_band=0.1, largest=127)
    assert (after != 20000) is moved


@pytest.mark.parametrize("largest", [7, 127])
def test_a_level_ends_at_the_limits(largest):
    options = {"gain": 1.0, "dead_band": 0.0, "largest": largest}
    assert next_level(100, 0, 10, 0.5, **options) == 0
    top = next_level(level_of(largest) - 100, 10, 10, 0.01, **options)
    assert top == level_of(largest)
    assert {whole_threshold(top, step, largest) for step in range(99)} == {largest}


@pytest.mark.parametrize("per_step", [0.25, 1.0, 40.0])
def test_mean_number_of_flips_reaches_the_target(per_step):
    rng = np.random.default_rng(0)
    level = 20000
    elements = 4096
    seen = []
    for _ in range(20000):
        # A module whose flips fall by the sixth power of the threshold.
        rate = per_step * (30.0 * 65536 / exact_threshold(level)) ** 6
        seen.append(int(rng.poisson(min(rate, elements))))
        level = next_level(
            level, seen[-1], elements, per_step / elements, gain=0.0625, dead_band=0.05, largest=127
        )
    assert np.mean(seen[500:]) == pytest.approx(per_step, rel=0.05)
