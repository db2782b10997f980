"""Gradients in one all-reduce: the sums of numbers that float32 adds exactly, and what follows them
in order.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from arb_ternary_distributed.one_sum import OneSum
from arb_ternary_testing.ranks import on_ranks
from arb_ternary_train.world import World

PLACES = 5


def tensors(place: int) -> list[Tensor]:
    whole = [
        torch.full((2, 3), 2.0**place),
        torch.full((4,), 10.0**place, dtype=torch.float64),
        torch.ones(2),
    ]
    return [*whole, torch.tensor([1e8, -1e8, 0.1, 0.0, 0.0][place : place + 1])]


def summed(world: World) -> tuple[list[Tensor], list[bool]]:
    sums = OneSum(world, 3)
    for first in range(0, PLACES, world.size):
        place = first + world.rank
        there = place < PLACES
        # The second tensor is missing at place 3, the third everywhere.
        sums.add_round(tensors(min(place, PLACES - 1)), [there, there and place != 3, False, there])
    return sums.finish(), sums.present


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_rank_has_the_sums_of_all(size: int) -> None:
    for found, present in on_ranks(size, summed):
        assert present == [True, True, False, True]
        assert torch.equal(found[0], torch.full((2, 3), 31.0))
        assert torch.equal(found[1], torch.full((4,), 10111.0, dtype=torch.float64))
        assert torch.equal(found[2], torch.zeros(2))
        # (1e8 - 1e8) + 0.1 and not (1e8 + 0.1) - 1e8, which is 0 in float32.
        assert torch.equal(found[3], torch.tensor([0.1]))
