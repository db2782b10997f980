from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.errors import DataError
from arb_ternary_text.data.sampler import WindowSampler, permutation, window_count

sizes = st.tuples(st.integers(1, 60), st.integers(1, 9), st.integers(1, 7))  # windows, block, batch


def _sampler(windows, block, batch, seed=0, order="random", extra=0):
    return WindowSampler(windows * block + 1 + min(extra, block - 1), block, batch, seed, order)


def test_windows_share_one_token_and_a_partial_one_is_dropped():
    assert window_count(9, 4) == 2  # tokens 0..4 and 4..8
    assert window_count(12, 4) == 2
    assert window_count(13, 4) == 3


@given(st.integers(1, 500), st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_a_permutation_is_one(size, seed, epoch):
    order = permutation(size, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(size))


def _splitmix64(state):
    """The reference generator as published, in Python integers: returns (next state, output)."""
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return state, z ^ (z >> 31)


def test_the_permutation_is_the_order_of_a_splitmix64_sequence():
    assert _splitmix64(1234567)[1] == 6457827717110365317  # the published test vector
    _, hashed = _splitmix64(41)
    _, state = _splitmix64(hashed + 3)
    keys = []
    for _ in range(100):
        state, key = _splitmix64(state)
        keys.append(key)
    assert permutation(100, seed=41, epoch=3).tolist() == sorted(range(100), key=keys.__getitem__)


def test_the_order_of_samples_is_frozen():
    assert permutation(10, seed=0, epoch=0).tolist() == [0, 7, 8, 2, 5, 9, 4, 6, 3, 1]
    assert permutation(10, seed=0, epoch=1).tolist() == [9, 4, 1, 7, 5, 8, 0, 6, 3, 2]


def test_first_places_are_uniform_over_epochs():
    # 4000 epochs of 8 windows: each window comes first 500 times, with a standard deviation of 21.
    firsts = np.bincount([permutation(8, 0, epoch)[0] for epoch in range(4000)], minlength=8)
    assert np.abs(firsts - 500).max() < 5 * 21


@given(sizes, st.integers(0, 2**32), st.integers(0, 8))
def test_every_epoch_covers_every_window_exactly_once(size, seed, extra):
    windows, block, batch = size
    sampler = _sampler(windows, block, batch, seed, extra=extra)
    assert sampler.samples == windows
    epochs = 3
    batches = -(-epochs * windows // batch)
    samples = np.concatenate([sampler.batch(cursor) for cursor in range(batches)])[
        : epochs * windows
    ]
    for epoch in samples.reshape(epochs, windows):
        assert sorted(epoch.tolist()) == list(range(windows))


@given(sizes, st.integers(0, 30))
def test_a_batch_depends_on_nothing_but_its_cursor(size, cursor):
    forwards = _sampler(*size, seed=5)
    alone = _sampler(*size, seed=5)
    for earlier in range(cursor):
        forwards.batch(earlier)
    assert forwards.batch(cursor).tolist() == alone.batch(cursor).tolist()
    assert forwards.cursor == 0


def test_epochs_and_seeds_are_shuffled_differently():
    sampler = _sampler(50, 4, 50)
    assert sampler.batch(0).tolist() != sampler.batch(1).tolist()
    assert sampler.batch(0).tolist() != _sampler(50, 4, 50, seed=1).batch(0).tolist()
    assert sampler.batch(0).tolist() != list(range(50))


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 7))
def test_sequential_rows_each_read_their_own_stretch_in_order(windows, block, batch):
    if windows < batch:
        return
    sampler = _sampler(windows, block, batch, order="sequential")
    steps = windows // batch
    assert sampler.batches_per_epoch == steps
    rows = np.stack([sampler.batch(cursor) for cursor in range(steps)], axis=1)
    assert rows.tolist() == [list(range(b * steps, (b + 1) * steps)) for b in range(batch)]
    assert sampler.batch(steps).tolist() == sampler.batch(0).tolist()
    assert [sampler.continues(cursor) for cursor in range(steps + 1)] == [False] + [True] * (
        steps - 1
    ) + [False]


def test_in_random_order_no_batch_continues_another():
    assert not any(_sampler(50, 4, 5).continues(cursor) for cursor in range(20))


def test_a_state_survives_json_and_continues_at_its_cursor():
    sampler = _sampler(50, 4, 5, seed=9)
    sampler.cursor = 17
    resumed = _sampler(50, 4, 5, seed=9)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert resumed.cursor == 17


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 8}, "seed was 9 and is 8"),
        ({"block": 2}, "block_size was 4 and is 2"),
        ({"batch": 6}, "batch_size was 5 and is 6"),
        ({"windows": 51}, "stream_length was 201 and is 205"),
        ({"order": "sequential"}, "order was 'random' and is 'sequential'"),
    ],
)
def test_state_of_other_settings_names_the_differing_field(change, words):
    state = _sampler(50, 4, 5, seed=9).state_dict()
    other = _sampler(**({"windows": 50, "block": 4, "batch": 5, "seed": 9} | change))
    with pytest.raises(DataError, match=words):
        other.load_state_dict(state)
    assert other.cursor == 0


def test_a_state_that_is_not_a_samplers_is_refused():
    sampler = _sampler(50, 4, 5)
    with pytest.raises(DataError, match="order"):
        sampler.load_state_dict(
            {key: value for key, value in sampler.state_dict().items() if key != "order"}
        )
    with pytest.raises(DataError, match="workers"):
        sampler.load_state_dict(sampler.state_dict() | {"workers": 2})
    for cursor in (-1, 2.0, True, "3"):
        with pytest.raises(DataError, match="cursor"):
            sampler.load_state_dict(sampler.state_dict() | {"cursor": cursor})


def test_text_shorter_than_a_block_is_refused():
    with pytest.raises(DataError) as caught:
        WindowSampler(128, 128, 1, name="notes.txt")
    assert (
        caught.value.what == "notes.txt: 128 tokens are too few for a block of 128: 129 are needed"
    )
    assert "at most 127" in caught.value.hint
    assert WindowSampler(129, 128, 1).samples == 1
    with pytest.raises(DataError, match="1 tokens are too few"):
        WindowSampler(1, 1, 1)


def test_a_text_too_short_for_the_parallel_streams_is_refused():
    with pytest.raises(DataError, match="for 6 parallel streams") as caught:
        _sampler(5, 8, 6, order="sequential")
    assert "at most 5" in caught.value.hint
