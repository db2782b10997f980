"""Votes that are sent in every round: the sums of one process, in less memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arb_ternary.backends.select import use_backend
from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.embedding import TernaryEmbedding
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.models import seed_votes, ternary_modules
from arb_ternary_distributed.process_group import ProcessGroup
from arb_ternary_distributed.round_votes import RoundVotes, RowSums
from arb_ternary_distributed.sharded_weights import ShardedWeights
from arb_ternary_distributed.shards import shard_rows
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
        self.one, self.two = (TernaryLinear(WIDTH, WIDTH, group_size=32) for _ in range(2))

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
            x = block(x)
        logits: Tensor = self.table.multiply(x, "int8") if self.head is None else self.head(x)
        return logits


def summed(world: World, tied: bool) -> dict[str, Any]:
    """Sum the votes of one step.

    Returns:
        Sums of own rows, casts, the most bytes that sums of all rows took, and bytes sent.
    """
    model = Stack(tied=tied)
    modules = [module for _, module in ternary_modules(model)]
    for module in modules:
        module.sum_votes()
    weights = rounds = None
    if isinstance(world, ProcessGroup):
        weights = ShardedWeights(model, world)
        shard_rows(model, world)
        rounds = weights.round_exchange(modules)
    most = 0

    def look(prepare: Callable[[], None] | None) -> None:
        nonlocal most
        if prepare is not None:
            prepare()
        found = [m.sums for m in modules if m.sums is not None]
        most = max(
            most,
            sum(
                part.untyped_storage().size() for s in found for part in (s.votes, s.exponent_votes)
            ),
        )

    for module in modules:
        module.on_backward = partial(look, module.on_backward)
    for first in range(0, MICROBATCHES, world.size):
        index = first + world.rank
        for module in modules:
            module.begin_microbatch(index)
        ids = torch.randint(0, IDS, (2, 8), generator=torch.Generator().manual_seed(index))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
        if index != 2:  # a micro-batch whose loss is not finite
            loss.backward()
        if weights is not None and rounds is not None:
            weights.end_round()
            rounds.end_round(last=first + world.size >= MICROBATCHES)
        for module in modules:
            module.end_microbatch()
    sums = [module.sums for module in modules]
    own = [
        each.own_votes if isinstance(each, RowSums) else each.votes
        for each in sums
        if each is not None
    ]
    exponents = [
        each.own_exponent_votes if isinstance(each, RowSums) else each.exponent_votes
        for each in sums
        if each is not None
    ]
    if rounds is not None:
        casts = [rounds.finish(module)[0] for module in modules]
    else:
        casts = [each.casts for each in sums if each is not None]
    sent = 0 if rounds is None else rounds.sent_bytes
    return {"own": own, "exponents": exponents, "casts": casts, "most": most, "sent": sent}


@pytest.fixture(scope="module")
def two() -> Any:
    return on_ranks(2, summed, False)


def digits(count: int, each: int) -> int:
    return math.ceil(count / each)


@pytest.mark.parametrize(
    ("tied", "size"),
    [(False, 2), pytest.param(True, 4, marks=pytest.mark.slow)],
    ids=["head-2", "tied-4"],
)
def test_sums_are_those_of_one_process_in_less_memory(tied: bool, size: int, two: Any) -> None:
    wanted = summed(SingleProcess(), tied)
    ranks = on_ranks(size, summed, tied) if tied else two
    assert all(votes.any() for votes in wanted["own"])
    for index, votes in enumerate(wanted["own"]):
        assert torch.equal(torch.cat([rank["own"][index] for rank in ranks]), votes)
        assert torch.equal(
            torch.cat([rank["exponents"][index] for rank in ranks]), wanted["exponents"][index]
        )
    # Two bytes per weight and four per exponent of a row: one block of two linears, and the table,
    # which is sent last. Freed matrices keep one element each.
    block = 2 * (2 * WIDTH * WIDTH + 4 * WIDTH)
    table = 2 * IDS * WIDTH + 4 * IDS
    idle = 6 * len(wanted["own"])
    for rank, found in enumerate(ranks):
        assert found["casts"] == wanted["casts"]
        assert block + table <= found["most"] <= block + table + idle
        assert sum(votes.nbytes for votes in found["own"]) == sum(
            2 * (last - first) * WIDTH
            for rows in [votes.shape[0] for votes in wanted["own"]]
            for first, last in [row_bounds(rows, size)[rank]]
        )
    assert wanted["most"] == sum(2 * votes.numel() + 4 * votes.shape[0] for votes in wanted["own"])


def test_a_vote_of_three_values_takes_1_6_bits(
    two: Any,
) -> None:
    for rank, found in enumerate(two):
        # Sign votes for the other rank's rows, five per byte; one byte per exponent; four bytes for
        # the casts of each module that may be sent: table and head with each block, and all modules
        # at the end.
        others = [slice_of(rows, 1 - rank) for rows in [IDS, *[WIDTH] * 2 * BLOCKS, IDS]]
        votes = sum(digits(rows * WIDTH, 5) + rows for rows in others)
        announced = 4 * (2 * BLOCKS + 2 * (BLOCKS - 1) + 2 + 2 * BLOCKS)
        rounds = MICROBATCHES // 2
        # micro-batch 2 has cast nothing
        assert found["sent"] == rounds * (votes + announced) - (votes if rank == 0 else 0)


def slice_of(rows: int, rank: int) -> int:
    first, last = row_bounds(rows, 2)[rank]
    return last - first


def late(world: World) -> list[Tensor]:
    """Return sums of own rows if a module casts after its block was left.

    One rank has no micro-batch in the second round.
    """
    torch.manual_seed(0)
    blocks = [TernaryLinear(16, 7, bias=True, group_size=32) for _ in range(2)]
    head = TernaryLinear(16, 3, bias=True, group_size=32)
    modules = [*blocks, head]
    for module in modules:
        module.sum_votes()
    rounds = RoundVotes(world, modules, blocks) if isinstance(world, ProcessGroup) else None

    def cast(module: TernaryLinear, seed: int) -> None:
        module(torch.randn(2, 16, generator=torch.Generator().manual_seed(seed))).sum().backward()

    for first in range(0, 3, world.size):
        index = first + world.rank
        if index < 3:
            for module in modules:
                module.begin_microbatch(index)
        steps: Sequence[tuple[TernaryLinear | None, TernaryLinear]] = (
            (None, head),
            (blocks[1], blocks[1]),
            (blocks[0], blocks[0]),
            (None, blocks[1]),
        )
        for number, (reached, module) in enumerate(steps):
            if rounds is not None and reached is not None:
                rounds.reach(reached)
            if index < 3:
                cast(module, 10 * index + number)
        if rounds is not None:
            rounds.end_round(last=first + world.size >= 3)
        for module in modules:
            module.end_microbatch()
    found: list[Tensor] = []
    for module in modules:
        assert module.sums is not None
        rows = slice(*row_bounds(module.shape.out_features, world.size)[world.rank])
        assert module.sums.bias is not None
        if rounds is None:
            found += [module.sums.votes, module.sums.exponent_votes, module.sums.bias]
            continue
        casts, own = rounds.finish(module)
        assert casts == (6 if module is blocks[1] else 3)
        found += [own, module.sums.exponent_votes[rows], module.sums.bias[rows]]
    return found


def test_late_votes_are_sent_at_the_end_of_the_round() -> None:
    ranks = on_ranks(2, late)
    for index, wanted in enumerate(late(SingleProcess())):
        assert torch.equal(torch.cat([rank[index] for rank in ranks]), wanted)


def too_many(world: World) -> str:
    linear = TernaryLinear(8, 4)
    linear.sum_votes()
    rounds = RoundVotes(world, [linear], [])
    assert linear.sums is not None
    linear.sums.casts = 20_000
    linear.sums.allocate()  # type: ignore[attr-defined]
    try:
        rounds.end_round(last=True)
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
    sums = RowSums(linear, slice(2, 4), 3)
    votes = sums.votes
    assert votes.untyped_storage().size() == 2
    with pytest.raises(RuntimeError, match="single memory location"):
        votes.add_(1)
    sums.allocate()
    votes[1, 2] = 5
    sums.allocate()
    assert votes[1, 2] == 5
    assert set(sums.tensors()) == {
        "votes",
        "exponent_votes",
        "own_votes",
        "own_exponent_votes",
        "stats",
    }
    sums.clear()
    assert set(sums.tensors()) == {"own_votes", "own_exponent_votes", "stats"}
    sums.allocate()
    assert votes.is_contiguous()
    assert not votes.any()
