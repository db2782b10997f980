"""Votes on their way to the owners of their rows: the sums of one process, in less memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from arb_ternary.backends.select import use_backend
from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.embedding import TernaryEmbedding
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.models import seed_votes, ternary_modules
from arb_ternary_distributed.process_group import ProcessGroup
from arb_ternary_distributed.shards import shard_rows
from arb_ternary_distributed.step_votes import RowSums, StepVotes
from arb_ternary_distributed.wire.rows import row_bounds
from arb_ternary_train.world import SingleProcess, World
from arb_test_support.ranks import on_ranks

WIDTH = 32
BLOCKS = 5
IDS = 24
MICROBATCHES = 8


class Block(nn.Module):
    """Two linears, whose weights and exponents are 32 x 32 and 32 x 1."""

    def __init__(self) -> None:
        super().__init__()
        self.one = TernaryLinear(WIDTH, WIDTH, group_size=32, bias=True)
        self.two = TernaryLinear(WIDTH, WIDTH, group_size=32)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.two(self.one(x).relu())
        return result


class Stack(nn.Module):
    """Blocks between a table and a head, or the table again."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        with use_backend("torch"):
            self.table = TernaryEmbedding(IDS, WIDTH, group_size=32)
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
            self.head = None if tied else TernaryLinear(WIDTH, IDS, group_size=32)
        seed_votes(self, 0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            # Backward computes the block again.
            x = checkpoint(block, x, use_reentrant=False)
        logits: Tensor = self.table.multiply(x, "int8") if self.head is None else self.head(x)
        return logits


def summed(world: World, tied: bool, every_round: bool = True) -> dict[str, Any]:
    """Sum the votes of one step.

    Returns:
        Sums of own rows, casts, and the most bytes that sums of all rows took.
    """
    model = Stack(tied=tied)
    modules = [module for _, module in ternary_modules(model)]
    for module in modules:
        module.sum_votes()
    votes = None
    if isinstance(world, ProcessGroup):
        shard_rows(model, world)
        votes = StepVotes(world, modules, every_round=every_round, block=2 * WIDTH * WIDTH)
    most = 0

    def look(prepare: Callable[[], None] | None) -> None:
        nonlocal most
        if prepare is not None:
            prepare()
        found = [m.sums for m in modules if m.sums is not None]
        most = max(most, sum(s.votes.untyped_storage().size() for s in found))

    for first in range(0, MICROBATCHES, world.size):
        index = first + world.rank
        last = first + world.size >= MICROBATCHES
        if votes is not None:
            votes.begin_round(last=last)
        for module in modules:
            module.on_backward = partial(look, module.on_backward)
            module.begin_microbatch(index)
        ids = torch.randint(0, IDS, (2, 8), generator=torch.Generator().manual_seed(index))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
        # The loss of one micro-batch is not finite, and a rank may have none in the last round.
        if index != 2 and index < MICROBATCHES:
            loss.backward()
        if votes is not None:
            votes.end_round(last=last)
        for module in modules:
            module.end_microbatch()
    found = []
    for module in modules:
        sums = module.sums
        assert sums is not None
        rows = slice(*row_bounds(module.shape.out_features, world.size)[world.rank])
        own = sums.votes if votes is None else votes.take(module)
        bias = None if sums.bias is None else sums.bias[rows]
        found.append((own, sums.exponent_votes[rows], bias))
    return {
        "sums": found,
        "casts": [module.sums.casts for module in modules if module.sums is not None],
        "most": most,
    }


def counted(world: World) -> dict[str, Any]:
    """Return what :func:`summed` does, and the bytes of the votes that this rank has sent."""
    with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as send:
        found = summed(world, tied=False)
    return {**found, "sent": sum(call.args[1].nbytes for call in send.call_args_list)}


@pytest.fixture(scope="module")
def two() -> Any:
    return on_ranks(2, counted)


def digits(count: int, each: int) -> int:
    return math.ceil(count / each)


@pytest.mark.parametrize(
    ("tied", "size", "every_round"),
    [
        (False, 2, True),
        pytest.param(True, 4, True, marks=pytest.mark.slow),
        pytest.param(True, 2, False, marks=pytest.mark.slow),
        pytest.param(False, 3, False, marks=pytest.mark.slow),
    ],
)
def test_sums_are_those_of_one_process(tied: bool, size: int, every_round: bool, two: Any) -> None:
    wanted = summed(SingleProcess(), tied)
    ranks = two if (tied, size) == (False, 2) else on_ranks(size, summed, tied, every_round)
    assert all(sums[0].any() for sums in wanted["sums"])
    for index, whole in enumerate(wanted["sums"]):
        for part, expected in enumerate(whole):
            if expected is not None:
                parts = [rank["sums"][index][part] for rank in ranks]
                assert torch.equal(torch.cat(parts), expected)
    assert all(found["casts"] == wanted["casts"] for found in ranks)


def test_a_rank_has_sums_of_all_rows_of_two_blocks(two: Any) -> None:
    # Two bytes per weight: a block of two linears, the one whose casts are being gathered, and the
    # table, which is sent last. Freed matrices keep one element each.
    for found in two:
        block = 2 * 2 * WIDTH * WIDTH
        table = 2 * IDS * WIDTH
        assert block < found["most"] <= 2 * block + table + 2 * len(found["sums"])


def test_a_vote_of_three_values_takes_1_6_bits(two: Any) -> None:
    for rank, found in enumerate(two):
        # Sign votes for the other rank's rows, five per byte; one byte per exponent; votes for a
        # bias of half the linears, five per byte.
        others = [slice_of(rows, 1 - rank) for rows in [IDS, *[WIDTH] * 2 * BLOCKS, IDS]]
        votes = sum(digits(rows * WIDTH, 5) + rows for rows in others)
        votes += BLOCKS * digits(slice_of(WIDTH, 1 - rank), 5)
        rounds = MICROBATCHES // 2
        # micro-batch 2 has cast nothing
        assert found["sent"] == rounds * votes - (votes if rank == 0 else 0)


def slice_of(rows: int, rank: int) -> int:
    first, last = row_bounds(rows, 2)[rank]
    return last - first


def too_many(world: World) -> str:
    linear = TernaryLinear(8, 4)
    linear.sum_votes()
    votes = StepVotes(world, [linear])
    assert linear.sums is not None
    linear.sums.casts = 20_000
    try:
        votes.end_round(last=True)
    except UsageProblem as error:
        return error.what
    return ""


def test_more_votes_than_a_sum_holds_are_refused() -> None:
    assert all(
        what.startswith("40000 casts of votes up to 1 in one step")
        for what in on_ranks(2, too_many)
    )


def test_freed_sums_cannot_be_written() -> None:
    linear = TernaryLinear(8, 6, group_size=32)
    sums = RowSums(linear, slice(2, 4))
    votes = sums.votes
    assert votes.untyped_storage().size() == 2
    with pytest.raises(RuntimeError, match="single memory location"):
        votes.add_(1)
    sums.allocate()
    votes[1, 2] = 5
    votes[3, 4] = 7
    sums.allocate()
    assert votes[1, 2] == 5
    assert set(sums.tensors()) == {"votes", "exponent_votes", "stats"}
    sums.keep_own(1)
    assert sums.own_votes[1, 4] == 7
    assert sums.own_votes.sum() == 7
    assert set(sums.tensors()) == {"_own", "exponent_votes", "stats"}
    sums.clear()
    sums.allocate()
    assert votes.is_contiguous()
    assert not votes.any()
    assert not sums.own_votes.any()
