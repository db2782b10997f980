"""Votes on their way to the ranks that own their rows, and flips on their way back.

Every rank has all trits, and the accumulators of its own rows only. A step sums a rank's votes over
its micro-batches; then the sums go to the owners (``delivery``), who add, clip and flip, and tell
the others what has flipped (``flips``). Votes for exponents and biases go the same way, and come
back as the settled accumulators, which all ranks have. Sums of integers do not depend on who
computed which, so every rank ends a step with the bytes of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import define
from torch import Tensor, nn
from torch.optim import Optimizer

from arb_ternary.backends.dispatch import kernel
from arb_ternary.backends.protocol import ROW_SHARDS
from arb_ternary.optim.protocol import inner_optimizers
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_distributed.collectives import all_gather_rows
from arb_ternary_distributed.delivery import Delivery
from arb_ternary_distributed.flips import count_bytes, decode_flips, encode_flips, flips_counted
from arb_ternary_distributed.rounds import RoundDelivery
from arb_ternary_distributed.row_sums import RowSums
from arb_ternary_distributed.rows import row_bounds, rows_shape
from arb_ternary_distributed.wire import wire_kernel

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup


@define(eq=False)
class OwnedRows:
    """The accumulators of a module on this rank; see ``RowShard``.

    Attributes:
        rows: of this rank.
        bounds: first row, and the one after the last, of every rank.
        flips: number of flips that the step under way has counted here; None where nothing was
            applied.
        before: own rows of the packed weight as they were, and
        after: as the step has left them; both None where the weight has no other rows and is
            changed itself.
    """

    module: TernaryModule
    world: ProcessGroup
    bounds: list[tuple[int, int]]
    flips: Tensor | None = None
    before: Tensor | None = None
    after: Tensor | None = None

    @property
    def rows(self) -> slice:
        """Those of this rank."""
        return slice(*self.bounds[self.world.rank])

    def gather(self, local: Tensor) -> Tensor:
        """See ``RowShard``."""
        counts = [last - first for first, last in self.bounds]
        return torch.cat(all_gather_rows(local, counts, group=self.world.group))

    def apply_votes(self, op: str, *settings: int) -> Tensor:
        """Flip own rows, of a copy: the weight itself follows when all ranks have told their
        flips.
        """
        module = self.module
        first, last = self.bounds[self.world.rank]
        self.before = wire_kernel(module.backend, "distributed.weight_rows")(
            module.weight, module.shape, first, last
        )
        self.after = self.before.clone()
        self.flips = self.flip_(self.after, op, *settings)
        return self.flips

    def flip_(self, weight: Tensor, op: str, *settings: int) -> Tensor:
        """Flip own rows in ``weight``, which holds no others; returns how many trits have changed,
        an int64 scalar.
        """
        module = self.module
        (first, last) = self.bounds[self.world.rank]
        if first == last:
            return torch.zeros((), dtype=torch.int64, device=weight.device)
        shape = rows_shape(module.shape, first, last)
        state = module.vote_state()._replace(
            weight=weight,
            exponent=module.exponent[first:last],
            exponent_votes=None,
            sums=None,
            exponent_sums=None,
            sizes=(shape.out_features, shape.in_features, shape.group_size, shape.vote_bits),
            first_row=first,
        )
        hashes = op == "apply_scaled_votes" and first > 0
        changed: Tensor = kernel(module.backend, op, ROW_SHARDS if hashes else None)(
            state, *settings
        )
        return changed


def shard_rows(model: nn.Module, world: ProcessGroup) -> None:
    """Keep of every module's accumulators the rows of this rank only; all ranks hold the same ones
    before.

    What is frozen keeps all of its own, which do not change.
    """
    for _, module in ternary_modules(model):
        if module.shard is None and not module.frozen:
            held = module.logical_votes()
            kind: type[OwnedRows] = getattr(module, "shard_type", OwnedRows)
            module.shard = kind(module, world, row_bounds(module.shape.out_features, world.size))
            module.votes = module.packed_votes(held)


def gather_rows(model: nn.Module) -> None:
    """Keep all rows of every module's accumulators on every rank again, for what one rank does
    alone. Collective.
    """
    for _, module in ternary_modules(model):
        if module.shard is not None:
            held = module.logical_votes()
            module.shard = None
            module.votes = module.packed_votes(held)


def exchange_votes(
    optimizer: Optimizer, world: ProcessGroup, rounds: RoundDelivery | None = None
) -> dict[TernaryOptimizer, OwnerRows]:
    """Have every rule on votes in ``optimizer`` exchange them with the other ranks; the rules, and
    how each does.

    Args:
        optimizer: whose rules.
        world: the ranks.
        rounds: sends the votes in every round; None: they are sent when a step ends.
    """
    rules = [each for each in inner_optimizers(optimizer) if isinstance(each, TernaryOptimizer)]
    exchanges = {rule: OwnerRows(world, rounds) for rule in rules}
    for rule, exchange in exchanges.items():
        rule.exchange = exchange
    return exchanges


@define(eq=False)
class OwnerRows:
    """The exchange of a rule on votes: owners compute; see the module's docstring."""

    world: ProcessGroup
    _rounds: RoundDelivery | None = None
    _sent_bytes: int = 0
    _delivery: Delivery | None = None

    @property
    def sent_bytes(self) -> int:
        """That this rank has handed to the network so far: a piece that goes to several ranks
        counts for each.

        What is sent in every round counts for all rules.
        """
        return self._sent_bytes + (0 if self._rounds is None else self._rounds.sent_bytes)

    # --- votes to their owners

    def begin(self) -> None:
        """A step begins: what was sent for one that was then not taken is dropped."""
        if self._delivery is not None:
            self._delivery.drop()
            self._delivery = None

    def watch(self, optimizer: TernaryOptimizer) -> None:
        """The last micro-batch of the step begins here: send its votes while backward goes on.
        Collective.
        """
        if self._rounds is not None:
            return
        self._delivery = Delivery(self.world, [m for m in optimizer.modules if m.sums is not None])
        self._delivery.watch()

    def flush(self, optimizer: TernaryOptimizer) -> None:
        """The last micro-batch of the step has ended here. Collective, after :meth:`watch` or
        without it.
        """
        if self._rounds is not None:
            return
        if self._delivery is None:
            self._delivery = Delivery(
                self.world, [m for m in optimizer.modules if m.sums is not None]
            )
        self._delivery.flush()

    def reduce_votes(self, optimizer: TernaryOptimizer) -> None:
        """Bring the votes of all ranks into the accumulators of own rows. Collective."""
        self.flush(optimizer)
        delivery = self._delivery
        self._delivery = None
        arrived = {} if delivery is None else delivery.finish()
        self._sent_bytes += 0 if delivery is None else delivery.sent_bytes
        voters = [module for module in optimizer.modules if module.sums is not None]
        for module in voters:
            sums = module.sums
            assert sums is not None
            module.end_microbatch()
            first, last = self._bounds(module)[self.world.rank]
            if self._rounds is not None:
                sums.casts, own = self._rounds.finish(module)
            else:
                sums.casts = arrived[module]
                own = sums.votes[first:last]
            module.settle(optimizer.whole_votes(module, own, first), slice(first, last))
            if isinstance(sums, RowSums):
                sums.release()
        self._gather_settled(voters)

    def _bounds(self, module: TernaryModule) -> list[tuple[int, int]]:
        return row_bounds(module.shape.out_features, self.world.size)

    def _gather_settled(self, modules: Sequence[TernaryModule]) -> None:
        """Give every rank the accumulators of exponents and biases, which owners have settled."""
        world = self.world
        held = [
            (part, self._bounds(module))
            for module in modules
            for part in (module.voting_exponents(), getattr(module, "bias_votes", None))
            if part is not None
        ]
        if not held:
            return
        own = torch.cat([part[slice(*bounds[world.rank])].reshape(-1) for part, bounds in held])
        sizes = [
            sum(part[slice(*bounds[rank])].numel() for part, bounds in held)
            for rank in range(world.size)
        ]
        for rank, piece in enumerate(self._all_gathered(own.view(torch.uint8), sizes)):
            if rank == world.rank:
                continue
            parts = [part[slice(*bounds[rank])] for part, bounds in held]
            for part, values in zip(
                parts, torch.split(piece.view(torch.int8), [p.numel() for p in parts]), strict=True
            ):
                part.copy_(values.view(part.shape))

    def _all_gathered(self, own: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Everybody's bytes, of known sizes."""
        self._sent_bytes += own.numel() * (self.world.size - 1)
        return all_gather_rows(own, sizes, group=self.world.group)

    # --- flips to everybody

    def gather_flips(self, optimizer: TernaryOptimizer, flips: Sequence[Tensor]) -> None:
        """Make the flips of all ranks in the weight of every module. Collective."""
        world = self.world
        flipped = [
            m.shard
            for m in optimizer.modules
            if isinstance(m.shard, OwnedRows) and m.shard.flips is not None
        ]
        self._count_flips([owner for owner in flipped if owner.before is None])
        owners = [owner for owner in flipped if owner.before is not None]
        if not owners:
            return
        spaces = [_address_space(owners, rank) for rank in range(world.size)]
        fronts = [count_bytes(space[-1]) for space in spaces]
        message = encode_flips(*_own_flips(owners, spaces[world.rank]), spaces[world.rank][-1])
        counts = self._all_gathered(message[: fronts[world.rank]], fronts)
        entries = self._all_gathered(
            message[fronts[world.rank] :], [2 * flips_counted(each) for each in counts]
        )
        for owner in owners:
            assert owner.flips is not None
            owner.flips.zero_()
        for rank, (front, rest) in enumerate(zip(counts, entries, strict=True)):
            places, directions = decode_flips(torch.cat([front, rest]), spaces[rank][-1])
            edges = torch.tensor(spaces[rank], device=places.device)
            cuts: list[int] = torch.searchsorted(places, edges).tolist()
            for owner, start, (begin, end) in zip(
                owners, spaces[rank], pairwise(cuts), strict=False
            ):
                _apply(owner, rank, places[begin:end] - start, directions[begin:end])
        for owner in owners:
            torch.autograd.graph.increment_version((owner.module.weight, owner.module.votes))
            owner.flips = owner.before = owner.after = None

    def _count_flips(self, owners: Sequence[OwnedRows]) -> None:
        """Of owners whose rows no other rank has: how many trits of all rows have flipped."""
        counts = [owner.flips for owner in owners if owner.flips is not None]
        if not counts:
            return
        total = torch.stack(counts)
        dist.all_reduce(total, group=self.world.group)
        self._sent_bytes += total.nbytes
        for owner, count, whole in zip(owners, counts, total, strict=True):
            count.copy_(whole)
            owner.flips = None


def _address_space(owners: Sequence[OwnedRows], rank: int) -> list[int]:
    """Where each module's rows of a rank begin when they are laid one after another, and where the
    last ends.
    """
    edges = [0]
    for owner in owners:
        first, last = owner.bounds[rank]
        edges.append(edges[-1] + (last - first) * owner.module.shape.in_features)
    return edges


def _own_flips(owners: Sequence[OwnedRows], space: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Places in the rank's address space, and directions, of what its rows have flipped."""
    places = []
    directions = []
    for owner, start in zip(owners, space, strict=False):
        module = owner.module
        (first, last) = owner.bounds[owner.world.rank]
        shape = rows_shape(module.shape, first, last)
        assert owner.before is not None
        assert owner.after is not None
        where, how = wire_kernel(module.backend, "distributed.flip_list")(
            owner.before, owner.after, shape
        )
        places.append(where + start)
        directions.append(how)
    return torch.cat(places), torch.cat(directions)


def _apply(owner: OwnedRows, rank: int, places: Tensor, directions: Tensor) -> None:
    module = owner.module
    first = owner.bounds[rank][0]
    assert owner.flips is not None
    owner.flips += places.numel()
    whole = places + first * module.shape.in_features
    wire_kernel(module.backend, "distributed.apply_flips_")(
        module.weight, module.shape, whole, directions
    )
