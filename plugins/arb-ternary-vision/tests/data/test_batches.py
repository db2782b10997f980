"""Samples in memory, labelled sources, and how samples are held out."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch

from arb_ternary.errors import DataError
from arb_ternary.protocols.data import Batches, BatchRequest, DataSource
from arb_ternary_text.data.sampler import permutation
from arb_ternary_train.capabilities import attachments, baselines
from arb_ternary_train.protocols import ShardableBatches
from arb_ternary_vision.data.batches import MemorySamples
from arb_ternary_vision.data.source import LabelledSource, split_by_class


def samples(count=10, name="digits", classes=3):
    data = np.arange(count * 4, dtype=np.uint8).reshape(count, 1, 2, 2)
    return MemorySamples(name, data, {"labels": np.arange(count) % classes}, levels=255)


def request(batch=4, order="random", workers=0, seed=3):
    return BatchRequest(batch, 999, seed, order, workers)


def test_batch_holds_the_samples_of_its_ids():
    with closing(samples(100).batches(request(8))) as batches:
        batch = next(batches)
    assert batch.data.dtype == torch.float32
    assert batch.data.shape == (8, 1, 2, 2)
    assert batch.sample_ids.dtype == batch.extras["labels"].dtype == torch.int64
    for row, index, label in zip(
        batch.data, batch.sample_ids.tolist(), batch.extras["labels"].tolist(), strict=True
    ):
        stored = (4 * index) % 256 + torch.arange(4, dtype=torch.float64).reshape(1, 2, 2)
        torch.testing.assert_close(row, (stored * 2 / 255 - 1).float(), rtol=0, atol=1e-7)
        assert label == index % 3
    ends = MemorySamples("ends", np.array([[0], [8], [16]], dtype=np.uint8), levels=16).read(
        np.arange(3)
    )
    assert ends.data.tolist() == [[-1.0], [0.0], [1.0]]


def test_floats_are_read_unchanged():
    data = np.array([[0.1, -0.7], [1.0, 0.3]], dtype=np.float64)
    assert (
        MemorySamples("floats", data).read(np.array([1, 0])).data.tolist()
        == data[::-1].astype(np.float32).tolist()
    )


def test_every_epoch_is_a_permutation():
    with closing(samples().batches(request())) as batches:
        drawn = torch.cat([next(batches).sample_ids for _ in range(5)]).tolist()
    assert drawn == [*permutation(10, 3, 0).tolist(), *permutation(10, 3, 1).tolist()]
    with closing(samples().batches(request(seed=4))) as batches:
        assert next(batches).sample_ids.tolist() == permutation(10, 4, 0)[:4].tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_batches_continue(workers):
    with closing(samples().batches(request(3))) as batches:
        whole = [next(batches) for _ in range(12)]
    with closing(samples().batches(request(3, workers=workers))) as batches:
        for _ in range(7):
            next(batches)
        state = batches.state_dict()
    with closing(samples().batches(request(3, workers=workers))) as resumed:
        resumed.load_state_dict(state)
        for expected in whole[7:]:
            batch = next(resumed)
            assert torch.equal(batch.data, expected.data)
            assert torch.equal(batch.sample_ids, expected.sample_ids)
            assert torch.equal(batch.extras["labels"], expected.extras["labels"])
    with (
        closing(samples(11).batches(request(3))) as other,
        pytest.raises(DataError, match="samples was 10 and is 11"),
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_shard_reads_the_batches_of_its_rank(workers):
    with closing(samples().batches(request(3))) as batches:
        whole = [next(batches).sample_ids.tolist() for _ in range(12)]
    with closing(samples().batches(request(3, workers=workers))) as shard:
        assert isinstance(shard, Batches)
        assert isinstance(shard, ShardableBatches)
        for step in range(3):  # rank 1 of 2 has batches 1 and 3 of the four of each step
            shard.shard(1, 2, 4)
            for place in (1, 3):
                shard.skip(1)
                assert next(shard).sample_ids.tolist() == whole[4 * step + place]


def test_sequential_rows_continue():
    with closing(samples().batches(request(3, "sequential"))) as batches:
        assert [next(batches).sample_ids.tolist() for _ in range(4)] == [
            [0, 3, 6],
            [1, 4, 7],
            [2, 5, 8],
            [0, 3, 6],
        ]
    with pytest.raises(DataError, match="digits: 10 samples are too few for 11 parallel streams"):
        samples().batches(request(11, "sequential"))


def test_evaluation_reads_every_sample_once():
    whole = [batch.sample_ids.tolist() for batch in samples().in_order(4, None)]
    assert whole == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [batch.sample_ids.tolist() for batch in samples().in_order(2, 2)] == [[0, 2], [5, 7]]


def test_digest_depends_on_all_content():
    first = samples()
    assert first.digest() == samples(name="others").digest()
    changed = samples()
    changed.extras["labels"][7] += 1
    brighter = samples()
    brighter.data[3, 0, 1, 1] += 1
    narrower = MemorySamples("x", first.data, first.extras, levels=254)
    digests = {each.digest() for each in (first, changed, brighter, narrower, samples(11))}
    assert len(digests) == 5


def test_samples_refuse_arrays_that_do_not_fit():
    with pytest.raises(DataError, match="empty: there is not one sample"):
        MemorySamples("empty", np.zeros((0, 1, 2, 2), dtype=np.uint8), levels=255)
    with pytest.raises(DataError, match="few: 2 samples, and 3 of labels"):
        MemorySamples(
            "few", np.zeros((2, 1, 1, 1), dtype=np.uint8), {"labels": np.zeros(3)}, levels=255
        )


def source(**changes):
    parts = {"train": samples(12, "training"), "validation": samples(7, "held out")} | changes
    return LabelledSource(**({"name": "digits", "classes": ("a", "b", "c")} | parts))


def test_labelled_source_properties():
    found = source()
    assert isinstance(found, DataSource)
    assert baselines(found, 1)
    assert attachments(found)
    assert found.image_shape == (1, 2, 2)
    assert found.vocabulary_size == 3
    assert found.samples_per_epoch(128) == 12
    assert (found.predictions_per_sample, found.prediction_noun) == (1, "image")
    assert found.attachments() == {"classes": ["a", "b", "c"], "image_shape": [1, 2, 2]}
    assert [len(batch.data) for batch in found.held_out(4, 128, None)] == [4, 3]
    # Labels 0 1 2 0 1 2 0: three sevenths, two, two.
    expected = -(3 / 7 * np.log(3 / 7) + 4 / 7 * np.log(2 / 7))
    assert found.baselines(1)["class_entropy"] == pytest.approx(expected, rel=1e-12)


def test_fingerprint_depends_on_parts_and_classes():
    renamed = source(classes=("a", "b", "d"))
    found = {
        each.fingerprint()
        for each in (source(), renamed, source(train=samples(13)), source(validation=samples(8)))
    }
    assert len(found) == 4
    assert source().fingerprint() == source(name="x").fingerprint()


def test_source_refuses_wrong_labels_and_shapes():
    with pytest.raises(DataError, match="held out: label 3 of sample 3 is none of the 3 classes"):
        source(validation=samples(7, "held out", classes=4))
    other = MemorySamples(
        "held out", np.zeros((2, 3, 2, 2), np.uint8), {"labels": np.zeros(2, np.int64)}, levels=255
    )
    with pytest.raises(
        DataError,
        match=r"held out: samples are of \[3, 2, 2\], and those of training are of \[1, 2, 2\]",
    ):
        source(validation=other)


def test_split_takes_a_share_of_each_class():
    labels = np.array([0] * 50 + [1] * 10 + [2] * 1 + [3] * 4)
    kept, taken = split_by_class(labels, 0.2, seed=0)
    assert sorted([*kept, *taken]) == list(range(65))
    assert np.bincount(labels[taken], minlength=4).tolist() == [10, 2, 0, 1]
    assert split_by_class(labels, 0.9, 0)[0].tolist() != []
    assert set(labels[split_by_class(labels, 0.99, 0)[0]]) == {0, 1, 2, 3}
    assert taken.tolist() != split_by_class(labels, 0.2, seed=1)[1].tolist()
