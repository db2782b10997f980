"""A dataloader as the data source of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from arb_ternary.errors import DataError, UsageProblem
from arb_ternary.protocols.data import Batch, Batches, BatchRequest, DataSource
from arb_ternary_progressive.loader_source import (
    LoaderBatches,
    LoaderSource,
    batches_per_epoch,
)

ROWS = [
    {"input_ids": torch.arange(4) + number, "sample_ids": torch.tensor(number)}
    for number in range(7)
]


def shuffled() -> Any:
    return DataLoader(ROWS, batch_size=2, shuffle=True)  # type: ignore[arg-type]


def drawn(batches: LoaderBatches, count: int) -> list[list[int]]:
    return [next(batches).sample_ids.tolist() for _ in range(count)]


def test_it_implements_the_data_protocols() -> None:
    source = LoaderSource(ROWS, 20)
    assert isinstance(source, DataSource)
    batches = source.batches(BatchRequest(16, 128, seed=3))
    assert isinstance(batches, Batches)
    assert not batches.continues
    with pytest.raises(UsageProblem, match="no held-out samples"):
        source.held_out(1, 4, None)


def test_each_epoch_has_a_seeded_order() -> None:
    epochs = drawn(LoaderBatches(shuffled(), 5), 8)
    first, second = (
        [sample for batch in epochs[start : start + 4] for sample in batch] for start in (0, 4)
    )
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert drawn(LoaderBatches(shuffled(), 5), 8) == epochs
    assert drawn(LoaderBatches(shuffled(), 6), 8) != epochs


@pytest.mark.parametrize("taken", range(9))
def test_it_resumes_and_restores_the_global_generator(
    taken: int,
) -> None:
    whole, stopped, resumed = (LoaderBatches(shuffled(), 1) for _ in range(3))
    expected = drawn(whole, 12)
    drawn(stopped, taken)
    torch.manual_seed(99)
    resumed.load_state_dict(stopped.state_dict())
    assert drawn(resumed, 12 - taken) == expected[taken:]
    resumed.load_state_dict({"epoch": 1, "position": 1})
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    next(resumed)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_targets_and_loss_mask_pass_through() -> None:
    tokens = torch.arange(8).view(2, 4)
    given = {
        "input_ids": tokens,
        "targets": tokens + 1,
        "loss_mask": tokens > 2,
        "name": ["a", "b"],
    }
    batch = next(LoaderBatches([given], 0))
    assert isinstance(batch, Batch)
    assert torch.equal(batch.data[:, :-1], tokens)
    assert torch.equal(batch.extras["targets"], tokens + 1)
    assert torch.equal(batch.extras["loss_mask"], tokens > 2)


class Unsized:
    """Has no length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.zeros(1, 4, dtype=torch.int64)] * 3)


def test_batches_are_counted_without_a_length() -> None:
    assert batches_per_epoch(shuffled()) == 4
    assert batches_per_epoch(Unsized()) == 3
    with pytest.raises(UsageProblem, match="it is an iterator"):
        batches_per_epoch(iter(ROWS))
    with pytest.raises(DataError, match="gives no batch"):
        batches_per_epoch([])


def test_an_iterator_is_exhausted_after_one_epoch() -> None:
    batches = LoaderBatches(iter([{"input_ids": torch.zeros(1, 4, dtype=torch.int64)}]), 0)
    next(batches)
    with pytest.raises(DataError, match="gives no batch in epoch 1"):
        next(batches)
