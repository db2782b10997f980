"""The exchange of votes and flips: owners compute.

Every rank has all trits, and the accumulators of its own rows only. A step sums a rank's votes over
its micro-batches. Then the sums are sent to the owners, who add, clip and flip, and send all ranks
what has flipped. Votes for exponents and biases are sent the same way, and return as the resulting
accumulators, which all ranks have. Sums of integers do not depend on which rank computed what, so
every rank ends a step with the bytes of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import define
from torch import Tensor
from torch.optim import Optimizer

from arb_ternary.optim.protocol import inner_optimizers
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_distributed.collectives import all_gather_rows
from arb_ternary_distributed.round_votes import RoundVotes, RowSums
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


def exchange_votes(
    optimizer: Optimizer,
    world: ProcessGroup,
    rounds: RoundVotes | None = None,
) -> dict[TernaryOptimizer, ShardExchange]:
    """Make every vote rule in ``optimizer`` exchange votes with the other ranks.

    Args:
        optimizer: whose rules.
        world: the ranks.
        rounds: sends the votes in every round; None = they are sent when a step ends.

    Returns:
        The exchange of each rule.
    """
    rules = [each for each in inner_optimizers(optimizer) if isinstance(each, TernaryOptimizer)]
    exchanges = {rule: ShardExchange(world, rounds) for rule in rules}
    for rule, exchange in exchanges.items():
        rule.exchange = exchange
    return exchanges


@define(eq=False)
class ShardExchange:
    """The ``Exchange`` of one vote rule on several ranks."""

    world: ProcessGroup
    _rounds: RoundVotes | None = None
    _sent_bytes: int = 0
    _votes: StepVotes | None = None

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has handed to the network so far.

        A piece that is sent to several ranks counts for each. What is sent in every round counts
        for all rules.
        """
        return self._sent_bytes + (0 if self._rounds is None else self._rounds.sent_bytes)

    # --- votes to the owners of their rows

    def begin_step(self) -> None:
        """Begin a step; what was sent for a step that was not taken is dropped."""
        if self._votes is not None:
            self._votes.drop()
            self._votes = None

    def send_during_backward(self, optimizer: TernaryOptimizer) -> None:
        """Send votes while the last backward pass of the step runs. Collective."""
        if self._rounds is None:
            self._votes = StepVotes(self.world, _voters(optimizer))
            self._votes.send_during_backward()

    def end_step(self, optimizer: TernaryOptimizer) -> None:
        """Send the remaining votes after the last backward pass of the step. Collective."""
        if self._rounds is not None:
            return
        if self._votes is None:
            self._votes = StepVotes(self.world, _voters(optimizer))
        self._votes.flush()

    def reduce_votes(self, optimizer: TernaryOptimizer) -> None:
        """Add the votes of all ranks to the accumulators of own rows. Collective."""
        self.end_step(optimizer)
        casts: dict[TernaryModule, int] = {}
        if self._votes is not None:
            casts = self._votes.finish()
            self._sent_bytes += self._votes.sent_bytes
            self._votes = None
        voters = _voters(optimizer)
        for module in voters:
            module.end_microbatch()
            sums = module.sums
            assert sums is not None
            first, last = self._bounds(module)[self.world.rank]
            if self._rounds is not None:
                sums.casts, own = self._rounds.finish(module)
            else:
                sums.casts = casts[module]
                own = sums.votes[first:last]
            module.add_step_votes(optimizer.whole_votes(module, own, first), slice(first, last))
            if isinstance(sums, RowSums):
                sums.free()
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
        parts = [
            [votes[slice(*bounds[rank])] for votes, bounds in found] for rank in range(world.size)
        ]
        own = torch.cat([part.reshape(-1) for part in parts[world.rank]])
        sizes = [sum(part.numel() for part in of_rank) for of_rank in parts]
        for rank, received in enumerate(self._all_gather(own.view(torch.uint8), sizes)):
            if rank == world.rank:
                continue
            pieces = torch.split(received.view(torch.int8), [part.numel() for part in parts[rank]])
            for part, values in zip(parts[rank], pieces, strict=True):
                part.copy_(values.view(part.shape))

    def _all_gather(self, own: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Gather the bytes of all ranks, of known sizes."""
        self._sent_bytes += own.numel() * (self.world.size - 1)
        return all_gather_rows(own, sizes, group=self.world.group)

    # --- flips to all ranks

    def gather_flips(self, optimizer: TernaryOptimizer, flips: Sequence[Tensor]) -> None:
        """Apply the flips of all ranks to the weight of every module. Collective."""
        world = self.world
        flipped = []
        for module in optimizer.modules:
            shard = module.shard
            if isinstance(shard, AccumulatorShard) and shard.flips is not None:
                flipped.append(shard)
        self._sum_counts([shard for shard in flipped if shard.before is None])
        shards = [shard for shard in flipped if shard.before is not None]
        if not shards:
            return

        # The positions of a rank's flips count the weights of its rows, module after module.
        starts = [_row_starts(shards, rank) for rank in range(world.size)]
        sizes = [each[-1] for each in starts]
        message = _encode_own_flips(shards, starts[world.rank])
        fronts = [count_bytes(size) for size in sizes]
        front = fronts[world.rank]
        counts = self._all_gather(message[:front], fronts)
        entries = self._all_gather(message[front:], [2 * flips_counted(each) for each in counts])

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

    def _sum_counts(self, shards: Sequence[AccumulatorShard]) -> None:
        """Sum numbers of flips of weights that are sharded too, whose flips are not needed."""
        counts = [shard.flips for shard in shards if shard.flips is not None]
        if not counts:
            return
        total = torch.stack(counts)
        dist.all_reduce(total, group=self.world.group)
        self._sent_bytes += total.nbytes
        for shard, own, whole in zip(shards, counts, total, strict=True):
            own.copy_(whole)
            shard.flips = None


def _voters(optimizer: TernaryOptimizer) -> list[TernaryModule]:
    return [module for module in optimizer.modules if module.sums is not None]


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
