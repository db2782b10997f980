"""Sums over ranks are those of one process, which numpy adds one after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from arb_ternary_distributed.sums import AllReduceSums, OrderedSums
from arb_ternary_train.world import World
from arb_test_support.ranks import on_ranks

SHAPES = [(5, 7), (), (0, 3), (1,), (33,), (2, 3, 4)]
DTYPES = [torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float32]
MICROBATCHES = 11
FEW = 5


def microbatch(number: int) -> list[Tensor]:
    """Return numbers of very different sizes, so that the order of additions matters."""
    draw = np.random.default_rng(number)
    tensors = []
    for shape, dtype in zip(SHAPES, DTYPES, strict=True):
        numbers = draw.normal(size=shape) * 10.0 ** draw.integers(-6, 7, size=shape)
        tensors.append(torch.tensor(numbers).to(dtype))
    tensors[0][0, :3] = torch.tensor([-0.0, float("inf"), 0.0])
    return tensors


def is_there(number: int, index: int) -> bool:
    """Return whether a micro-batch has a tensor.

    Micro-batch 4 has none, no micro-batch has the last tensor, and some others are missing.
    """
    return number != 4 and index != len(SHAPES) - 1 and (number * 5 + index * 3) % 4 != 0


def summed(world: World, count: int) -> tuple[list[Tensor], list[bool]]:
    sums = OrderedSums(world)
    for first in range(0, count, world.size):
        number = first + world.rank
        if number >= count:
            sums.add_round(microbatch(0), [False] * len(SHAPES))
            continue
        tensors = microbatch(number)
        tensors[0] = tensors[0].T.contiguous().T  # columns first, as some gradients lie
        sums.add_round(tensors, [is_there(number, index) for index in range(len(tensors))])
    return sums.finish(), sums.present


def one_after_the_other(count: int, index: int) -> Any:
    """Return the left fold in numpy, None if nothing is there.

    bfloat16 is float32 that is rounded after every addition.
    """
    total = None
    for number in range(count):
        if is_there(number, index):
            tensor = microbatch(number)[index]
            narrow = tensor.dtype == torch.bfloat16
            added = (tensor.float() if narrow else tensor).numpy()
            total = added if total is None else total + added
            if narrow:
                total = torch.from_numpy(np.asarray(total)).to(torch.bfloat16).float().numpy()
    return total


def edges(world: World) -> tuple[list[Tensor], list[Tensor]]:
    """Return sums of one present and one absent tensor, and of no tensors."""
    sums = OrderedSums(world)
    nothing = OrderedSums(world)
    sums.add_round(
        [torch.full((3,), -0.0), torch.full((4,), float("nan"))], [world.rank == 1, False]
    )
    nothing.add_round([], [])
    return sums.finish(), nothing.finish()


def on_rank(world: World, _folder: Path) -> Any:
    return *summed(world, MICROBATCHES), *edges(world)


def test_sums_over_two_ranks_are_bitwise_those_of_one(two_ranks: Any) -> None:
    check([report["test_sums"] for report in two_ranks[0]])


@pytest.mark.slow
def test_sums_over_three_ranks_are_bitwise_those_of_one(tmp_path: Path) -> None:
    check(on_ranks(3, on_rank, tmp_path))


def check(results: list[Any]) -> None:
    wanted = [one_after_the_other(MICROBATCHES, index) for index in range(len(SHAPES))]
    assert wanted[-1] is None
    backwards = sum(
        microbatch(number)[4].float()
        for number in reversed(range(MICROBATCHES))
        if is_there(number, 4)
    )
    assert not np.array_equal(np.asarray(backwards), wanted[4])
    for sums, present, alone, nothing in results:
        assert present == [total is not None for total in wanted]
        assert sums[0].stride() == (1, 5)
        for found, total, shape, dtype in zip(sums, wanted, SHAPES, DTYPES, strict=True):
            assert (tuple(found.shape), found.dtype) == (shape, dtype)
            wide = found.float() if dtype == torch.bfloat16 else found
            numbers = wide.contiguous().numpy()
            expected = np.zeros(shape, numbers.dtype)
            if total is not None:
                expected = np.asarray(total, numbers.dtype)
            assert numbers.tobytes() == expected.tobytes()
        # A negative zero to which nothing is added stays negative; absent tensors are not read.
        assert torch.signbit(alone[0]).all()
        assert alone[1].tolist() == [0.0] * 4
        assert nothing == []


def powers(number: int) -> list[Tensor]:
    whole = [
        torch.full((2, 3), 2.0**number),
        torch.full((4,), 10.0**number, dtype=torch.float64),
        torch.ones(2),
    ]
    return [*whole, torch.tensor([1e8, -1e8, 0.1, 0.0, 0.0][number : number + 1])]


def all_reduced(world: World) -> tuple[list[Tensor], list[bool]]:
    sums = AllReduceSums(world, 3)
    for first in range(0, FEW, world.size):
        number = first + world.rank
        there = number < FEW
        # The second tensor is missing in micro-batch 3, the third everywhere.
        sums.add_round(powers(min(number, FEW - 1)), [there, there and number != 3, False, there])
    return sums.finish(), sums.present


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_all_reduced_sums_are_those_of_all_ranks(size: int) -> None:
    for found, present in on_ranks(size, all_reduced):
        assert present == [True, True, False, True]
        assert torch.equal(found[0], torch.full((2, 3), 31.0))
        assert torch.equal(found[1], torch.full((4,), 10111.0, dtype=torch.float64))
        assert torch.equal(found[2], torch.zeros(2))
        # (1e8 - 1e8) + 0.1 and not (1e8 + 0.1) - 1e8, which is 0 in float32.
        assert torch.equal(found[3], torch.tensor([0.1]))
