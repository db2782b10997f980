"""Sums over ranks are those of one process, which numpy adds up one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from arb_ternary_distributed.ordered_sums import OrderedSums
from arb_ternary_testing.ranks import on_ranks
from arb_ternary_train.world import World

SHAPES = [(5, 7), (), (0, 3), (1,), (33,), (2, 3, 4)]
DTYPES = [torch.float32, torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float32]
PLACES = 11


def microbatch(place: int) -> list[Tensor]:
    """Numbers of very different sizes, so that another order of additions gives another sum."""
    draw = np.random.default_rng(place)
    tensors = []
    for shape, dtype in zip(SHAPES, DTYPES, strict=True):
        numbers = draw.normal(size=shape) * 10.0 ** draw.integers(-6, 7, size=shape)
        tensors.append(torch.tensor(numbers).to(dtype))
    tensors[0][0, :3] = torch.tensor([-0.0, float("inf"), 0.0])
    return tensors


def is_there(place: int, index: int) -> bool:
    """Of places and tensors: place 4 lost all, the last tensor nobody has, and others are missing
    here and there.
    """
    return place != 4 and index != len(SHAPES) - 1 and (place * 5 + index * 3) % 4 != 0


def summed(world: World, places: int) -> tuple[list[Tensor], list[bool]]:
    sums = OrderedSums(world)
    for first in range(0, places, world.size):
        place = first + world.rank
        if place >= places:
            sums.add_round(microbatch(0), False)
            continue
        tensors = microbatch(place)
        tensors[0] = tensors[0].T.contiguous().T  # columns first, as some gradients lie
        sums.add_round(tensors, [is_there(place, index) for index in range(len(tensors))])
    return sums.finish(), sums.present


def one_after_the_other(places: int, index: int) -> Any:
    """The left fold in numpy, None where nothing is there; bfloat16 is float32 rounded after every
    addition.
    """
    total = None
    for place in range(places):
        if is_there(place, index):
            tensor = microbatch(place)[index]
            narrow = tensor.dtype == torch.bfloat16
            added = (tensor.float() if narrow else tensor).numpy()
            total = added if total is None else total + added
            if narrow:
                total = torch.from_numpy(np.asarray(total)).to(torch.bfloat16).float().numpy()
    return total


def edges(world: World) -> tuple[list[Tensor], list[Tensor]]:
    """What is alone or absent, and nothing at all."""
    sums = OrderedSums(world)
    nothing = OrderedSums(world)
    sums.add_round(
        [torch.full((3,), -0.0), torch.full((4,), float("nan"))], [world.rank == 1, False]
    )
    nothing.add_round([], True)
    return sums.finish(), nothing.finish()


def on_rank(world: World, _folder: Path) -> Any:
    return *summed(world, PLACES), *edges(world)


def test_sums_over_two_ranks_are_those_of_one_process_bit_for_bit(two_ranks: Any) -> None:
    check([told["test_ordered_sums"] for told in two_ranks[0]])


@pytest.mark.slow
def test_sums_over_three_ranks_are_those_of_one_process_bit_for_bit(tmp_path: Path) -> None:
    check(on_ranks(3, on_rank, tmp_path))


def check(told: list[Any]) -> None:
    wanted = [one_after_the_other(PLACES, index) for index in range(len(SHAPES))]
    assert wanted[-1] is None
    backwards = sum(
        microbatch(place)[4].float() for place in reversed(range(PLACES)) if is_there(place, 4)
    )
    assert not np.array_equal(np.asarray(backwards), wanted[4])
    for sums, present, alone, nothing in told:
        assert present == [total is not None for total in wanted]
        assert sums[0].stride() == (1, 5)
        for found, total, shape, dtype in zip(sums, wanted, SHAPES, DTYPES, strict=True):
            assert (tuple(found.shape), found.dtype) == (shape, dtype)
            numbers = (found.float() if dtype == torch.bfloat16 else found).contiguous().numpy()
            expected = (
                np.zeros(shape, numbers.dtype)
                if total is None
                else np.asarray(total, numbers.dtype)
            )
            assert numbers.tobytes() == expected.tobytes()
        # A negative zero to which nothing is added stays one; what is absent is not read.
        assert torch.signbit(alone[0]).all()
        assert alone[1].tolist() == [0.0] * 4
        assert nothing == []
