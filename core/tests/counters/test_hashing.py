"""The counter hash against a re-statement on Python integers."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.counters.hashing import (
    counter_hash,
    counter_hash_rows,
    hash_key,
    stream_id,
    uniform,
)

M32 = (1 << 32) - 1
M64 = (1 << 64) - 1


def restated_key(seed: int, step: int, stream: int, high: int) -> int:
    h = 0
    for word in (seed, step, stream, high):
        z = ((h ^ word) + 0x9E3779B97F4A7C15) & M64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
        h = z ^ (z >> 31)
    return (h >> 32) ^ (h & M32)


def restated_hash(index: int, seed: int, step: int, stream: int) -> int:
    x = ((index & M32) * 0x9E3779B1 + restated_key(seed, step, stream, index >> 32)) & M32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & M32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & M32
    return x ^ (x >> 16)


words = st.integers(0, 2**48)


@given(words, words, st.integers(0, 2**34), st.integers(0, 2**33), st.integers(1, 40))
def test_the_hash_equals_its_definition(
    seed: int, step: int, stream: int, start: int, count: int
) -> None:
    got = [value & M32 for value in counter_hash(count, seed, step, stream, start=start).tolist()]
    assert got == [restated_hash(start + i, seed, step, stream) for i in range(count)]


def test_a_range_across_32_bits_changes_its_key() -> None:
    start = 2**32 - 3
    got = [value & M32 for value in counter_hash(6, 1, 2, 3, start=start).tolist()]
    assert got == [restated_hash(start + i, 1, 2, 3) for i in range(6)]


def test_long_ranges_do_not_depend_on_how_they_are_cut() -> None:
    whole = counter_hash(200_000, 5, 6, 7)
    assert torch.equal(whole[70_001:70_101], counter_hash(100, 5, 6, 7, start=70_001))


@given(
    st.lists(
        st.one_of(st.integers(0, 50), st.integers(2**31 - 3, 2**31 + 3), st.integers(2**40, 2**41)),
        max_size=5,
    ),
    st.sampled_from([0, 1, 2, 7]),
)
def test_rows_are_hashed_by_the_index_in_the_whole_matrix(rows: list[int], columns: int) -> None:
    got = counter_hash_rows(torch.tensor(rows, dtype=torch.int64), columns, 1, 2, 3)
    assert got.shape == (len(rows), columns)
    for row, values in zip(rows, got.tolist(), strict=True):
        assert [value & M32 for value in values] == [
            restated_hash(row * columns + k, 1, 2, 3) for k in range(columns)
        ]


def test_known_values_stay_the_same() -> None:
    assert hash_key(0, 0, 0) == restated_key(0, 0, 0, 0)
    assert stream_id("123456789") == 0xCBF43926  # the check value of CRC-32


def test_uniform_numbers_have_the_uniform_moments() -> None:
    u = uniform((1000, 1000), 1, 2, 3).double()
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    # Standard errors: 1/sqrt(12 n) for the mean, 1/sqrt(180 n) for the variance; bounds at five of
    # them.
    assert abs(float(u.mean()) - 0.5) < 5 / (12e6) ** 0.5
    assert abs(float(u.var()) - 1 / 12) < 5 / (180e6) ** 0.5


def test_neighbouring_counters_are_uncorrelated() -> None:
    n = 1_000_000
    base = uniform((n,), 1, 2, 3).double() - 0.5
    for other in (uniform((n,), 1, 3, 3), uniform((n,), 2, 2, 3), uniform((n,), 1, 2, 4)):
        correlation = float((base * (other.double() - 0.5)).mean() * 12)
        assert abs(correlation) < 5 / n**0.5
    assert abs(float((base[1:] * base[:-1]).mean() * 12)) < 5 / n**0.5
