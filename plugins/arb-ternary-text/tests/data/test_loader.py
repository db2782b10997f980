from __future__ import annotations

import threading
import time
from contextlib import closing
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arb_ternary.errors import DataError, EnvironmentProblem
from arb_ternary_text.data import loader as loader_module
from arb_ternary_text.data.loader import SampledBatches, read_windows
from arb_ternary_text.data.memmap import open_tokens, write_tokens
from arb_ternary_text.data.sampler import WindowSampler
from arb_ternary_text.data.source import StreamSource
from arb_ternary_text.data.tokenizers import ByteTokenizer

STREAM = np.random.default_rng(0).integers(0, 256, size=1001, dtype=np.uint8)


def _batches(stream, sampler, **options):
    return SampledBatches(
        sampler,
        lambda indices_B: loader_module.read_windows(stream, indices_B, sampler.block_size),
        **options,
    )


def _held_out(*arguments):
    return StreamSource("text", ByteTokenizer(), STREAM, STREAM).held_out(*arguments)


def _loader(workers=0, order="random", cursor=0, batch=6, seed=3):
    sampler = WindowSampler(len(STREAM), 10, batch, seed, order)
    sampler.cursor = cursor
    return _batches(STREAM, sampler, workers=workers)


def _take(loader, count):
    with closing(loader):
        return [(batch.data.tolist(), batch.sample_ids.tolist()) for batch in islice(loader, count)]


def test_a_batch_holds_the_windows_of_its_sample_ids():
    loader = _loader()
    with closing(loader):
        batch = next(loader)
    assert batch.data.dtype == torch.int64
    assert batch.data.shape == (6, 11)
    assert batch.sample_ids.dtype == torch.int64
    assert batch.sample_ids.tolist() == loader.sampler.batch(0).tolist()
    for row, index in zip(batch.data.tolist(), batch.sample_ids.tolist(), strict=True):
        assert row == STREAM[index * 10 : index * 10 + 11].tolist()


def test_a_sample_keeps_its_identity_in_every_epoch_and_order():
    seen = {}
    for order in ("random", "sequential"):
        for tokens, ids in _take(_loader(order=order), 60):
            for row, sample in zip(tokens, ids, strict=True):
                assert seen.setdefault(sample, row) == row
    assert len(seen) == 100


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
def test_any_integer_stream_becomes_int64(dtype):
    stream = (np.arange(30) % 200).astype(dtype)
    batch = read_windows(stream, np.array([2, 0]), 7)
    assert batch.data.dtype == torch.int64
    assert batch.data.tolist() == [list(range(14, 22)), list(range(8))]


@pytest.mark.parametrize("order", ["random", "sequential"])
def test_any_number_of_workers_gives_the_same_batches(order):
    alone = _take(_loader(0, order), 40)
    assert _take(_loader(1, order), 40) == alone
    assert _take(_loader(3, order), 40) == alone


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_reads_what_it_draws_and_nothing_else(workers, monkeypatch):
    whole = _take(_loader(), 20)
    read = []
    original = loader_module.read_windows
    monkeypatch.setattr(
        loader_module,
        "read_windows",
        lambda stream, ids, size: read.append(ids.tolist()) or original(stream, ids, size),
    )
    with closing(_loader(workers)) as loader:
        for step in range(4):  # five batches per step, of which rank 1 of 2 has 1 and 3
            loader.shard(1, 2, 5)
            for skipped, index in ((1, 1), (1, 3)):
                loader.skip(skipped)
                batch = next(loader)
                assert (batch.data.tolist(), batch.sample_ids.tolist()) == whole[5 * step + index]
            loader.skip(1)
            assert loader.state_dict()["cursor"] == 5 * (step + 1)
        # A batch of the other rank can be drawn all the same.
        assert next(loader).sample_ids.tolist() == loader.sampler.batch(20).tolist()
    numbers = {tuple(loader.sampler.batch(number).tolist()): number for number in range(60)}
    assert (
        sorted(numbers[tuple(ids)] % 5 for ids in read if numbers[tuple(ids)] < 20)
        == [1] * 4 + [3] * 4
    )
    assert {numbers[tuple(ids)] % 5 for ids in read if numbers[tuple(ids)] > 20} <= {1, 3}


@settings(max_examples=15)
@given(
    st.integers(0, 50), st.sampled_from([0, 1, 3]), st.sampled_from([0, 1, 3]), st.integers(1, 130)
)
def test_a_resumed_loader_continues_the_uninterrupted_stream(
    stop, workers_before, workers_after, batch
):
    uninterrupted = _take(_loader(0, batch=batch), stop + 5)
    first = _loader(workers_before, batch=batch)
    assert _take(first, stop) == uninterrupted[:stop]
    resumed = _loader(workers_after, batch=batch)
    resumed.load_state_dict(first.state_dict())
    assert _take(resumed, 5) == uninterrupted[stop:]


def test_batches_that_were_read_ahead_do_not_move_the_cursor():
    loader = _loader(workers=3)
    next(loader)
    next(loader)
    assert loader.state_dict()["cursor"] == 2
    loader.close()
    assert loader.state_dict()["cursor"] == 2


def test_moving_the_cursor_drops_what_was_read_ahead():
    uninterrupted = _take(_loader(), 31)
    for workers in (0, 2):
        with closing(_loader(workers)) as loader:
            next(loader)
            for cursor in (30, 0, 1, 7):
                loader.load_state_dict(loader.state_dict() | {"cursor": cursor})
                assert next(loader).data.tolist() == uninterrupted[cursor][0]


def test_workers_read_ahead_and_no_further_than_their_queue(monkeypatch):
    read = []
    real = loader_module.read_windows
    monkeypatch.setattr(
        loader_module, "read_windows", lambda *args: read.append(args[1].tolist()) or real(*args)
    )
    loader = _loader(workers=2)
    next(loader)
    loader._executor.shutdown(wait=True)
    assert sorted(read) == sorted(loader.sampler.batch(cursor).tolist() for cursor in range(5))
    loader.close()


def test_a_slow_first_batch_does_not_change_the_order(monkeypatch):
    real = loader_module.read_windows
    first = _loader().sampler.batch(0).tolist()

    def slow_at_first(stream, indices, block):
        if indices.tolist() == first:
            time.sleep(0.05)
        return real(stream, indices, block)

    expected = _take(_loader(), 8)
    monkeypatch.setattr(loader_module, "read_windows", slow_at_first)
    assert _take(_loader(workers=3), 8) == expected


def test_closing_ends_the_threads_and_the_iteration():
    before = set(threading.enumerate())
    with closing(_loader(workers=3)) as loader:
        next(loader)
        assert any(thread.name.startswith("arb-data") for thread in threading.enumerate())
    loader.close()
    assert set(threading.enumerate()) <= before  # others may end meanwhile
    with pytest.raises(ValueError, match="closed"):
        next(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_id_is_raised_to_the_caller_and_the_cursor_stays(tmp_path, workers):
    ids = np.arange(41) % 50
    ids[23] = 77
    write_tokens(tmp_path / "ids.bin", ids, "uint16")
    stream = open_tokens(tmp_path / "ids.bin", 50, dtype="uint16")
    sampler = WindowSampler(41, 10, 1, order="sequential")
    with closing(_batches(stream, sampler, workers=workers)) as loader:
        next(loader)
        next(loader)
        for _ in range(2):
            with pytest.raises(
                DataError,
                match=r"ids\.bin: token 23 \(byte 46\) is 77, outside the vocabulary of 50",
            ):
                next(loader)
        assert loader.sampler.cursor == 2
        loader.sampler.cursor = 3
        assert next(loader).data.tolist() == [list(range(30, 41))]


def test_a_mapped_stream_gives_the_same_batches_as_one_in_memory(tmp_path):
    write_tokens(tmp_path / "ids.npy", STREAM, "uint8")
    mapped = open_tokens(tmp_path / "ids.npy", 256)
    sampler = WindowSampler(len(mapped), 10, 6, 3)
    with closing(_batches(mapped, sampler, workers=2)) as loader:
        got = [(b.data.tolist(), b.sample_ids.tolist()) for b in islice(loader, 20)]
    assert got == _take(_loader(), 20)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_pinned_memory_without_an_accelerator_is_an_error():
    with pytest.raises(EnvironmentProblem, match="pin_memory"):
        _batches(STREAM, WindowSampler(len(STREAM), 10, 2), pin_memory=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator")
def test_pinned_batches_are_the_same_batches():
    sampler = WindowSampler(len(STREAM), 10, 6, 3)
    with closing(_batches(STREAM, sampler, workers=2, pin_memory=True)) as loader:
        batches = list(islice(loader, 10))
    assert all(batch.data.is_pinned() for batch in batches)
    assert [(b.data.tolist(), b.sample_ids.tolist()) for b in batches] == _take(_loader(), 10)


def test_evaluation_reads_every_window_once_in_order():
    batches = list(_held_out(7, 10, None))
    assert [len(batch.sample_ids) for batch in batches] == [7] * 14 + [2]
    assert torch.cat([batch.sample_ids for batch in batches]).tolist() == list(range(100))
    targets = torch.cat([batch.data[:, 1:].flatten() for batch in batches])
    assert targets.tolist() == STREAM[1:].tolist()


def test_limited_evaluation_spreads_over_the_stream():
    batches = list(_held_out(5, 10, 4))
    assert torch.cat([batch.sample_ids for batch in batches]).tolist() == list(range(0, 100, 5))
    assert len(list(_held_out(7, 10, 1000))) == 15


def test_evaluation_of_a_short_text_fails_at_the_call():
    with pytest.raises(DataError, match=r"the validation stream: 1001 tokens are too few"):
        _held_out(2, 1001, None)
