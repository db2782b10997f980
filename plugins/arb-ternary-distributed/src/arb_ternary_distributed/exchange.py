"""The exchange of votes and flips: owners compute.

Every rank has all trits, and the accumulators of its own rows only. Sums of votes are sent to the
owners (``step_votes``), who add, clip and flip when a step ends, and send all ranks what has
flipped. Votes for exponents and biases are sent the same way, and return as the resulting
accumulators, which all ranks have. Sums of integers do not depend on which rank computed what, so
every rank ends a step with the bytes of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from attrs import define
from torch import Tensor
from torch.optim import Optimizer

from arb_ternary.optim.protocol import inner_optimizers
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_distributed.collectives import all_gather_rows, all_gather_views
from arb_ternary_distributed.shards import AccumulatorShard
from arb_ternary_distributed.step_votes import StepVotes
from arb_ternary_distributed.wire import wire_kernel
from arb_ternary_distributed.wire.flips import (
    count_bytes,
    decode_flips,
    encode_flips,
    flips_counted,
)
from arb_ternary_distributed.wire.rows import row_bounds

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup


def exchange_votes(optimizer: Optimizer, world: ProcessGroup, votes: StepVotes) -> None:
    """Make every vote rule in ``optimizer`` exchange votes with the other ranks.

    Args:
        optimizer: whose rules.
        world: the ranks.
        votes: sends the votes of the modules of all rules.
    """
    for each in inner_optimizers(optimizer):
        if isinstance(each, TernaryOptimizer):
            each.exchange = ShardExchange(world, votes)


@define(eq=False)
class ShardExchange:
    """The ``Exchange`` of one vote rule on several ranks."""

    world: ProcessGroup
    votes: StepVotes

    # --- votes to the owners of their rows

    def reduce_votes(self, optimizer: TernaryOptimizer) -> None:
        """Add the votes of all ranks to the accumulators of own rows. Collective."""
        voters = [module for module in optimizer.modules if module.sums is not None]
        for module in voters:
            module.end_microbatch()
            own = self.votes.take(module)
            rows = slice(*self._bounds(module)[self.world.rank])
            module.add_step_votes(optimizer.whole_votes(module, own, rows.start), rows)
        self._gather_small_accumulators(voters)

    def _bounds(self, module: TernaryModule) -> list[tuple[int, int]]:
        return row_bounds(module.shape.out_features, self.world.size)

    def _gather_small_accumulators(self, modules: Sequence[TernaryModule]) -> None:
        """Give every rank the accumulators of exponents and biases, which owners have computed."""
        world = self.world
        found: list[tuple[Tensor, list[tuple[int, int]]]] = []
        for module in modules:
            small = [module.voting_exponents(), getattr(module, "bias_votes", None)]
            found += [(votes, self._bounds(module)) for votes in small if votes is not None]
        if not found:
            return
        views = [
            [votes[slice(*bounds[rank])] for votes, bounds in found] for rank in range(world.size)
        ]
        all_gather_views(views, rank=world.rank, group=world.group)

    # --- flips to all ranks

    def gather_flips(self, optimizer: TernaryOptimizer, flips: Sequence[Tensor]) -> None:
        """Apply the flips of all ranks to the weight of every module. Collective."""
        world = self.world
        shards = []
        for module in optimizer.modules:
            shard = module.shard
            if isinstance(shard, AccumulatorShard) and shard.flips is not None:
                shards.append(shard)
        if not shards:
            return

        # The positions of a rank's flips count the weights of its rows, module after module.
        starts = [_row_starts(shards, rank) for rank in range(world.size)]
        sizes = [each[-1] for each in starts]
        message = _encode_own_flips(shards, starts[world.rank])
        fronts = [count_bytes(size) for size in sizes]
        front = fronts[world.rank]
        counts = all_gather_rows(message[:front], fronts, group=world.group)
        flips_of = [2 * flips_counted(each) for each in counts]
        entries = all_gather_rows(message[front:], flips_of, group=world.group)

        for shard in shards:
            assert shard.flips is not None
            shard.flips.zero_()
        for rank in range(world.size):
            received = torch.cat([counts[rank], entries[rank]])
            positions, directions = decode_flips(received, sizes[rank])
            edges = torch.tensor(starts[rank], device=positions.device)
            cuts: list[int] = torch.searchsorted(positions, edges).tolist()
            for shard, start, (begin, end) in zip(
                shards,
                starts[rank],
                pairwise(cuts),
                strict=False,
            ):
                _apply_flips(shard, rank, positions[begin:end] - start, directions[begin:end])
        for shard in shards:
            torch.autograd.graph.increment_version((shard.module.weight, shard.module.votes))
            shard.flips = None
            shard.before = None
            shard.after = None


def _row_starts(shards: Sequence[AccumulatorShard], rank: int) -> list[int]:
    """Return where each module's rows of a rank begin if they follow one another, and the end."""
    starts = [0]
    for shard in shards:
        first, last = shard.bounds[rank]
        starts.append(starts[-1] + (last - first) * shard.module.shape.in_features)
    return starts


def _encode_own_flips(shards: Sequence[AccumulatorShard], starts: Sequence[int]) -> Tensor:
    """Return the message about the flips of own rows."""
    positions = []
    directions = []
    for shard, start in zip(shards, starts, strict=False):
        flip_list = wire_kernel(shard.module.backend, "distributed.flip_list")
        found, signs = flip_list(shard.before, shard.after, shard.rows_shape)
        positions.append(found + start)
        directions.append(signs)
    return encode_flips(torch.cat(positions), torch.cat(directions), starts[-1])


def _apply_flips(shard: AccumulatorShard, rank: int, positions: Tensor, directions: Tensor) -> None:
    """Apply flips of the rows of ``rank`` to the weight, and count them."""
    module = shard.module
    assert shard.flips is not None
    shard.flips += positions.numel()
    first = shard.bounds[rank][0]
    apply = wire_kernel(module.backend, "distributed.apply_flips_")
    in_weight = positions + first * module.shape.in_features
    apply(module.weight, module.shape, in_weight, directions)
