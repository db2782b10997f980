import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary_votes.magnitudes import FRACTION, Magnitudes, mitchell_log2


@given(st.floats(2.0**-120, 2.0**120, width=32))
def test_logarithm_is_within_mitchells_error(x):
    got = int(mitchell_log2(torch.tensor([x]))) / FRACTION
    mantissa, exponent = math.frexp(x)
    assert got == math.floor((exponent - 1 + (2 * mantissa - 1)) * FRACTION) / FRACTION
    # log2(1 + f) - f is largest, 0.0861, at f = 1 / ln 2 - 1.
    worst = math.log2(1 / math.log(2)) - (1 / math.log(2) - 1)
    assert 0 <= math.log2(x) - got <= worst + 1 / FRACTION


def update(tracked, sums, weight, casts=1):
    Magnitudes.update_all([tracked], [sums], weight, [casts])


def factors_of(tracked, quanta):
    return Magnitudes.all_factors([tracked], [quanta])[0]


def shifts_of(tracked, quanta):
    return Magnitudes.all_shifts([tracked], [quanta])[0]


def sums_of(gradient):
    magnitude = np.abs(gradient)
    return torch.tensor(np.concatenate([magnitude.sum(1), magnitude.sum(0)]), dtype=torch.float32)


def test_a_gradient_of_rank_one_is_normalised_to_one_size():
    rng = np.random.default_rng(0)
    rows = np.exp2(rng.integers(-9, 9, 6))
    columns = np.exp2(rng.integers(-9, 9, 5))
    gradient = np.outer(rows, columns)
    tracked = Magnitudes(6, 5)
    update(tracked, sums_of(gradient), 0.02)
    factors = factors_of(tracked, 10.0).numpy()
    votes = gradient * factors[:6, None] * factors[6:]
    # All elements alike, up to the error of two logarithms and of two roundings to 1/256.
    assert votes.max() / votes.min() < 2 ** (2 * 0.0861 + 4 / FRACTION)
    shifts = shifts_of(tracked, 10.0).numpy()
    wanted = np.log2(factors)
    assert np.abs(-shifts[:6] - wanted[:6]).max() <= 0.5 + 2 / FRACTION
    assert np.abs(-shifts[6:] - wanted[6:]).max() <= 0.5 + 2 / FRACTION


def test_a_gaussian_gradient_gives_votes_of_the_wanted_deviation():
    gradient = np.random.default_rng(1).normal(0, 3e-4, (400, 300))
    tracked = Magnitudes(400, 300)
    update(tracked, sums_of(gradient), 0.02)
    factors = factors_of(tracked, 12.8).numpy()
    deviation = (gradient * factors[:400, None] * factors[400:]).std()
    # Mitchell's logarithms of one row and one column are up to 0.0861 too small, and the mean of
    # logarithms once.
    assert 12.8 * 2**-0.1 < deviation < 12.8 * 2**0.2


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=12), st.integers(1, 60))
def test_the_running_logarithm_is_the_fixed_point_recurrence(exponents, percent):
    weight = percent / 100
    tracked = Magnitudes(1, 1)
    expected = 0
    for step, exponent in enumerate(exponents, start=1):
        update(tracked, torch.tensor([2.0**exponent, 2.0**exponent]), weight)
        share = round(65536 * max(weight, 1 / step))
        expected += ((FRACTION * exponent - expected) * share + 2**15) >> 16
    assert int(tracked.row) == int(tracked.column) == expected


def test_rows_without_a_gradient_keep_their_value():
    tracked = Magnitudes(2, 2)
    update(tracked, sums_of(np.array([[1.0, 1.0], [4.0, 4.0]])), 0.5)
    before = tracked.row.clone()
    update(tracked, sums_of(np.array([[0.0, 0.0], [64.0, 64.0]])), 0.5)
    assert tracked.row[0] == before[0]
    assert tracked.row[1] > before[1]


def test_a_sum_that_overflowed_keeps_everything_finite():
    tracked = Magnitudes(2, 2)
    update(tracked, torch.tensor([math.inf, math.nan, 1.0, 1.0]), 0.5)
    assert torch.isfinite(factors_of(tracked, 1.0)).all()


def test_means_are_those_of_one_micro_batch():
    sums = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    one = Magnitudes(3, 2)
    several = Magnitudes(3, 2)
    update(one, sums, 0.5)
    update(several, 4 * sums, 0.5, casts=4)
    assert torch.equal(one.row, several.row)
    assert torch.equal(one.column, several.column)


def test_a_state_dict_restores_and_refuses_another_shape():
    tracked = Magnitudes(3, 2)
    update(tracked, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), 0.5, casts=2)
    tracked.deferred = 6
    other = Magnitudes(3, 2)
    other.load_state_dict(tracked.state_dict())
    assert (other.casts, other.spread) == (2, 7)
    assert torch.equal(factors_of(other, 3.0), factors_of(tracked, 3.0))
    assert other.steps == 1
    with pytest.raises(ValueError, match="3 x 2 weight do not fit one of 2 x 3"):
        Magnitudes(2, 3).load_state_dict(tracked.state_dict())


shapes = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6)


@given(shapes, st.integers(0, 2**32 - 1))
def test_several_weights_at_once_are_each_by_itself(sizes, seed):
    rng = np.random.default_rng(seed)
    together, alone = ([Magnitudes(*size) for size in sizes] for _ in range(2))
    for _ in range(3):
        sums = [
            torch.tensor(np.exp2(rng.uniform(-40, 40, sum(size))), dtype=torch.float32)
            for size in sizes
        ]
        for each in sums:
            each[torch.from_numpy(rng.random(len(each)) < 0.2)] = 0
        casts = [int(count) for count in rng.integers(1, 5, len(sizes))]
        Magnitudes.update_all(together, sums, 0.02, casts)
        for each, total, count in zip(alone, sums, casts, strict=True):
            update(each, total, 0.02, count)
    quanta = [float(each) for each in rng.uniform(0.1, 10, len(sizes))]
    for one, other, size, factors, shifts in zip(
        together,
        alone,
        quanta,
        Magnitudes.all_factors(together, quanta),
        Magnitudes.all_shifts(together, quanta),
        strict=True,
    ):
        saved = one.state_dict()
        wanted = other.state_dict()
        assert all(
            torch.equal(torch.as_tensor(saved[key]), torch.as_tensor(wanted[key])) for key in wanted
        )
        # Bits: where a weight stands among others changes none.
        assert torch.equal(factors, factors_of(other, size))
        assert torch.equal(shifts, shifts_of(other, size))


def test_factors_are_powers_of_two_and_normal_numbers():
    tracked = Magnitudes(1, 5)
    tracked.load_state_dict(
        {
            "row": torch.tensor([7], dtype=torch.int16),
            "steps": 1,
            "casts": 1,
            "deferred": 0,
            "column": torch.tensor([0, 1, -300, 32767, -32768], dtype=torch.int16),
        }
    )
    row, *columns = factors_of(tracked, 3.0).tolist()
    assert row == pytest.approx(3 * math.sqrt(2 / math.pi), rel=2**-23)
    assert columns[:3] == pytest.approx([1, 2 ** (-1 / 256), 2 ** (300 / 256)], rel=2**-24)
    assert columns[3] == pytest.approx(2**-126 * 2 ** (1 / 256), rel=2**-23)
    assert columns[4] == 2.0**127


@pytest.mark.parametrize("octaves", [-7, 3, 16])
def test_rescaled_magnitudes_are_those_of_rescaled_gradients(octaves):
    rng = np.random.default_rng(2)
    tracked = Magnitudes(8, 6)
    other = Magnitudes(8, 6)
    for _ in range(3):
        gradient = rng.normal(0, 1e-2, (8, 6))
        update(tracked, sums_of(gradient), 0.1)
        update(other, sums_of(gradient * 2.0**octaves), 0.1)
    tracked.rescale(octaves)
    assert torch.equal(tracked.row, other.row)
    assert torch.equal(tracked.column, other.column)
