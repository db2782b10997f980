"""Hidden positions, and the replacement of their tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arb_ternary.counters.hashing import counter_hash, stream_id
from arb_ternary.errors import ConfigError
from arb_ternary_progressive.masks import corrupt, hidden_count, hidden_positions, time_key


@given(st.integers(0, 4096), st.integers(0, 100))
def test_the_count_is_the_floor_of_positions_times_share(positions: int, percent: int) -> None:
    assert hidden_count(positions, percent / 100) == positions * percent // 100


@given(st.integers(0, 4096), st.floats(0, 1))
def test_the_count_tolerates_rounding_errors(positions: int, share: float) -> None:
    assert hidden_count(positions, share) - math.floor(positions * share) in {0, 1}
    assert hidden_count(positions, share) == math.floor(positions * share) or (
        math.ceil(positions * share) - positions * share < 2e-9
    )


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, (1 << 63) - 1), min_size=1, max_size=6),
    st.integers(1, 70),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_exactly_the_floor_is_hidden_in_every_row(
    ids: list[int], positions: int, share: float, seed: int
) -> None:
    rows = len(ids)
    hidden = hidden_positions(torch.tensor(ids), positions, [share] * rows, [0] * rows, seed)
    assert hidden.dtype == torch.bool
    assert hidden.shape == (rows, positions)
    assert hidden.sum(dim=1).tolist() == [hidden_count(positions, share)] * rows


def test_positions_have_the_smallest_hashes() -> None:
    """Restate the counter hash: index = id S + s, stream = CRC-32 of the name."""
    positions = 16
    seed = 7
    key = time_key(0.5)
    sample = 41
    stream = stream_id("arb_ternary_progressive.positions")
    bits = counter_hash(positions, seed, key, stream, start=sample * positions).numpy()
    expected = np.zeros(positions, dtype=bool)
    expected[np.argsort(bits, kind="stable")[:5]] = True
    found = hidden_positions(torch.tensor([3, sample]), positions, [1.0, 5 / 16], [key, key], seed)
    assert found[1].numpy().tolist() == expected.tolist()


def test_a_mask_depends_on_sample_time_and_seed_alone() -> None:
    ids = torch.tensor([5, 9, 1 << 61, 12])
    keys = [1, 2, 1, 2]
    shares = [0.3, 0.4, 0.3, 0.4]
    together = hidden_positions(ids, 40, shares, keys, 3)
    for row in range(4):
        alone = hidden_positions(
            ids[row : row + 1], 40, shares[row : row + 1], keys[row : row + 1], 3
        )
        assert torch.equal(together[row], alone[0])
    order = [2, 0, 3, 1]
    moved = hidden_positions(
        ids[order], 40, [shares[i] for i in order], [keys[i] for i in order], 3
    )
    assert torch.equal(moved, together[order])


def test_another_sample_time_or_seed_gives_another_mask() -> None:
    def mask(sample: int = 5, key: int = 1, seed: int = 3) -> list[bool]:
        return hidden_positions(torch.tensor([sample]), 64, [0.5], [key], seed)[0].tolist()

    assert mask() == mask()
    assert len({tuple(m) for m in (mask(), mask(sample=6), mask(key=2), mask(seed=4))}) == 4


def test_every_position_is_hidden_equally_often() -> None:
    rows = 4000
    positions = 20
    hidden = hidden_positions(torch.arange(rows), positions, [0.25] * rows, [0] * rows, 0)
    share = hidden.float().mean(dim=0)
    # Five standard deviations of a binomial share.
    assert bool(((share - 0.25).abs() < 5 * math.sqrt(0.25 * 0.75 / rows)).all())


def test_rows_may_differ_in_share_and_time() -> None:
    hidden = hidden_positions(torch.arange(3), 20, [0.0, 0.5, 1.0], [0, 3, 7], 0)
    assert hidden.sum(dim=1).tolist() == [0, 10, 20]


def replaced(tokens: torch.Tensor, hidden: torch.Tensor, **changes: object) -> torch.Tensor:
    options = {
        "vocabulary_size": 50,
        "mask_token": 49,
        "mask_share": 0.8,
        "random_share": 0.1,
        **changes,
    }
    return corrupt(tokens, hidden, torch.arange(len(tokens)), [0] * len(tokens), 0, **options)


def test_replacement_shares_are_80_10_10() -> None:
    rows = 2000
    positions = 50
    tokens = torch.full((rows, positions), 11)
    inputs = replaced(tokens, torch.ones(rows, positions, dtype=torch.bool))
    count = rows * positions
    masked = int((inputs == 49).sum())
    kept = int((inputs == 11).sum())
    others = count - masked - kept
    # A random token is the token itself once in 49.
    for found, share in ((masked, 0.8), (kept, 0.1 + 0.1 / 49), (others, 0.1 * 48 / 49)):
        assert abs(found / count - share) < 5 * math.sqrt(share * (1 - share) / count)


def test_random_tokens_are_uniform_without_the_mask_token() -> None:
    tokens = torch.zeros(1000, 49, dtype=torch.int64)
    hidden = torch.ones_like(tokens, dtype=torch.bool)
    inputs = replaced(tokens, hidden, mask_token=20, mask_share=0.0, random_share=1.0)
    counts = torch.bincount(inputs.flatten(), minlength=50)
    assert int(counts[20]) == 0
    others = counts[torch.arange(50) != 20].double()
    # Chi-squared with 48 degrees of freedom: 5 standard deviations above its mean.
    assert float(((others - 1000) ** 2 / 1000).sum()) < 48 + 5 * math.sqrt(96)


def test_only_hidden_positions_change() -> None:
    tokens = torch.arange(30).repeat(8, 1)
    hidden = hidden_positions(torch.arange(8), 30, [0.5] * 8, [0] * 8, 0)
    inputs = replaced(tokens, hidden, mask_share=1.0, random_share=0.0)
    assert torch.equal(inputs == 49, hidden)
    assert torch.equal(inputs[~hidden], tokens[~hidden])


def test_the_replacement_does_not_depend_on_the_token() -> None:
    """Check that the input does not reveal the target."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.ones(64, 40, dtype=torch.bool)
    first, second = (torch.randint(0, 49, (64, 40), generator=generator) for _ in range(2))
    one = replaced(first, hidden)
    other = replaced(second, hidden)
    kept = (one == first) & (other == second)
    assert torch.equal(one[~kept], other[~kept])


def test_random_tokens_need_another_token() -> None:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ConfigError, match="no token but the mask token"):
        replaced(tokens, torch.ones_like(tokens, dtype=torch.bool), vocabulary_size=1, mask_token=0)


def test_no_time_has_its_own_key() -> None:
    assert time_key(None) == 0
    assert len({time_key(None), time_key(0.0), time_key(0.5), time_key(1.0)}) == 4
