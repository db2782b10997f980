"""Ranks that exchange votes end every step with the bytes of one process."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.ternary.embedding import TernaryEmbedding
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_distributed.exchange import exchange_votes
from arb_ternary_distributed.shards import shard_rows
from arb_ternary_distributed.step_votes import StepVotes
from arb_ternary_distributed.sums import OrderedSums
from arb_ternary_distributed.wire.rows import row_bounds
from arb_ternary_train.world import SingleProcess, World
from arb_ternary_votes.config import MomentumVotesConfig
from arb_ternary_votes.momentum_votes import MomentumVotes
from arb_ternary_votes.scaled_votes import ScaledVotes
from arb_ternary_votes.sign_votes import SignVotes
from arb_test_support.ranks import on_ranks

MICROBATCHES = 5
STEPS = 4


class Tied(nn.Module):
    """A tied table, a layer that only some micro-batches reach, and a bias."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = TernaryEmbedding(13, 40, vote_bits=bits, group_size=32)
        self.middle = TernaryLinear(40, 40, vote_bits=bits, bias=True, group_size=32)
        self.rare = TernaryLinear(40, 1, vote_bits=bits)

    def forward(self, ids: torch.Tensor, *, rare: bool) -> torch.Tensor:
        hidden = self.middle(self.table(ids)).relu()
        if rare:
            hidden = hidden + self.rare(hidden)
        return self.table.multiply(hidden, "int8")


def rule(name: str, model: nn.Module) -> TernaryOptimizer:
    modules = dict(ternary_modules(model))
    if name == "sign":
        return SignVotes(modules, lr=4.0)
    if name == "momentum":
        return MomentumVotes(modules, MomentumVotesConfig(flip_rate=0.05))
    return ScaledVotes(modules, lr=0.5, vote_levels=3 if name == "levels" else None)


def trained(
    world: World, name: str, bits: int, overlapped: bool = True
) -> tuple[dict[str, Any], list[Any]]:
    """Train some steps.

    Returns:
        The state of the model, and the outcome of each step.
    """
    model = Tied(bits)
    optimizer = rule(name, model)
    modules = [module for _, module in ternary_modules(model)]
    for module in modules:
        module.sum_votes()
    if world.size > 1:
        shard_rows(model, world)
        votes = StepVotes(world, modules, during_backward=overlapped, block=1)
        exchange_votes(optimizer, world, votes)
    reports = []
    for step in range(STEPS):
        total = OrderedSums(world) if world.size > 1 else None
        for first in range(0, MICROBATCHES, world.size):
            index = first + world.rank
            last = first + world.size >= MICROBATCHES
            if world.size > 1:
                votes.begin_round(last=last)
            if index < MICROBATCHES:
                for module in modules:
                    module.begin_microbatch(index)
                ids = torch.randint(
                    0,
                    13,
                    (6, 8),
                    generator=torch.Generator().manual_seed(step * MICROBATCHES + index),
                )
                logits = model(ids, rare=index in (1, 2))
                (
                    nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())
                    / MICROBATCHES
                ).backward()
            if world.size > 1:
                votes.end_round(last=last)
            if total is not None:
                parts = [
                    part
                    for m in modules
                    for part in (m.sums.stats, m.sums.magnitudes)
                    if part is not None
                ]
                total.add_round(parts, [index < MICROBATCHES] * len(parts))
                for part in parts:
                    part.zero_()
            for module in modules:
                module.end_microbatch()
        if total is not None:
            sums = iter(total.finish())
            for module in modules:
                module.stats.copy_(next(sums))
                if module.magnitudes is not None:
                    module.magnitudes.copy_(next(sums))
        reports.append(optimizer.step())
        optimizer.zero_grad()
    return model.state_dict(), reports


@pytest.mark.parametrize(
    ("name", "bits", "size"),
    [
        pytest.param("scaled", 8, 2, marks=pytest.mark.slow),
        ("scaled", 4, 3),
        pytest.param("scaled", 2, 2, marks=pytest.mark.slow),
        pytest.param("sign", 8, 3, marks=pytest.mark.slow),
        pytest.param("levels", 8, 2, marks=pytest.mark.slow),
        pytest.param("levels", 4, 4, marks=pytest.mark.slow),
        pytest.param("levels", 2, 3, marks=pytest.mark.slow),
        pytest.param("sign", 2, 2, marks=pytest.mark.slow),
        pytest.param("sign", 4, 4, marks=pytest.mark.slow),
        pytest.param("momentum", 4, 2, marks=pytest.mark.slow),
        pytest.param("momentum", 4, 4, marks=pytest.mark.slow),
    ],
)
def test_ranks_train_as_one_process_does(name: str, bits: int, size: int) -> None:
    wanted, steps = trained(SingleProcess(), name, bits)
    assert sum(step.flips for step in steps) > 0
    for state, reports in on_ranks(size, trained, name, bits):
        assert reports == steps
        assert state.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(state[key], value), key


def sent_meanwhile(world: World) -> tuple[list[int], int, list[Tensor]]:
    """Return messages sent when backward reached each of four layers, last first, and in the end;
    sums of own rows.
    """
    with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as send:
        return sent_with(send, world)


def sent_with(send: Mock, world: World) -> tuple[list[int], int, list[Tensor]]:
    torch.manual_seed(0)
    layers = [TernaryLinear(16, 16, bias=True) for _ in range(4)]
    for layer in layers:
        layer.sum_votes()
    votes = StepVotes(world, layers, block=1)
    seen: list[int] = []
    x = torch.randn(2, 16) + world.rank
    votes.begin_round(last=True)
    for layer in layers:
        layer.begin_microbatch(world.rank)
        x = layer(x)
        x.register_hook(lambda _: seen.append(send.call_count))
    x.sum().backward()
    votes.end_round(last=True)
    own = [votes.take(layer) for layer in layers]
    assert all(layer.sums.casts == world.size for layer in layers if layer.sums is not None)
    return seen, send.call_count, own


def test_votes_are_sent_during_backward() -> None:
    ranks = on_ranks(2, sent_meanwhile)
    for seen, total, _ in ranks:
        # A layer's hook runs before the exchange looks, which then finds the layers behind it
        # complete, gathers the casts of one, and sends the one before.
        assert (seen, total) == ([0, 0, 0, 1], 4)
    # One process casts the votes of both.
    torch.manual_seed(0)
    layers = [TernaryLinear(16, 16, bias=True) for _ in range(4)]
    x = torch.randn(2, 16)
    for layer in layers:
        layer.sum_votes()
    for rank in range(2):
        y = x + rank
        for layer in layers:
            layer.begin_microbatch(rank)
            y = layer(y)
        y.sum().backward()
        for layer in layers:
            layer.end_microbatch()
    for index, layer in enumerate(layers):
        assert layer.sums is not None
        assert torch.equal(torch.cat([sums[index] for _, _, sums in ranks]), layer.sums.votes)


def many_casts(world: World) -> list[list[int]]:
    """Return sums of exponent votes of own rows, one of which does not fit 16 bits."""
    linear = TernaryLinear(64, 3, group_size=32)
    linear.use_scaled_votes()
    linear.sum_votes()
    votes = StepVotes(world, [linear])
    assert linear.sums is not None
    linear.sums.casts = 300
    linear.sums.exponent_votes[1, 0] = 127 * 300
    linear.sums.exponent_votes[2, 1] = -(127 * 299) + world.rank
    votes.end_round(last=True)
    votes.take(linear)
    sums: list[list[int]] = linear.sums.exponent_votes[
        slice(*row_bounds(3, 2)[world.rank])
    ].tolist()
    return sums


def test_sums_of_exponent_votes_may_exceed_16_bits() -> None:
    assert on_ranks(2, many_casts) == [[[0, 0], [2 * 127 * 300, 0]], [[0, -2 * 127 * 299 + 1]]]
