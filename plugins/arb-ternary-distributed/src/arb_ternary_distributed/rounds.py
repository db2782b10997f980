"""Votes that leave in every round of micro-batches, block by block behind backward, for ranks that
keep few of them.

Votes that wait for the end of a step need a sum for every row on every rank. Here the sums of a
block are sent when backward has left it, and their memory is given back; their owner adds what
comes to the sums of its rows, which it keeps over the rounds. A message is made of ``parcels``.
What is outside of blocks goes with the next block once it has cast all its votes of a round (a
head), or at the end of the round (an embedding, or one that is also the head).

Before a message every rank tells how often it has cast, as numbers on the host: no host waits for
its GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from arb_ternary.ternary.module import TernaryModule
from arb_ternary.ternary.step_sums import StepSums
from arb_ternary_distributed.buffers import Parcel, bias_parcel, vote_parcels
from arb_ternary_distributed.collectives import all_gather_single
from arb_ternary_distributed.row_sums import RowSums
from arb_ternary_distributed.rows import row_bounds

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup


@frozen(eq=False)
class _Arriving:
    """A message from all ranks that is on its way here."""

    work: Any
    received: Tensor
    sizes: list[int]
    modules: Sequence[TernaryModule]
    casts: Sequence[Sequence[int]]  # of each rank, in each module
    last: bool


class RoundDelivery:
    """The votes of modules, step after step. Collective: all ranks make one, and call its methods
    in the same order.

    Args:
        world: the ranks.
        modules: which cast votes, between two steps; their sums become ``RowSums``.
        blocks: which backward leaves one after the other.

    Attributes:
        sent_bytes: that this rank has handed to the network so far.
    """

    def __init__(
        self, world: ProcessGroup, modules: Sequence[TernaryModule], blocks: Sequence[nn.Module]
    ) -> None:
        self._world = world
        self._bounds = {
            module: row_bounds(module.shape.out_features, world.size) for module in modules
        }
        self._sums: dict[TernaryModule, RowSums] = {}
        for module, bounds in self._bounds.items():
            module.sums = self._sums[module] = RowSums(
                module, slice(*bounds[world.rank]), world.size
            )
            module.on_backward = self._sums[module].hold
        self._inside = {
            block: [part for part in block.modules() if part in self._sums] for block in blocks
        }
        within = {module for parts in self._inside.values() for module in parts}
        self._outside = [module for module in modules if module not in within]
        self._left: nn.Module | None = None
        self._arriving: _Arriving | None = None
        self.sent_bytes = 0

    def reach(self, block: nn.Module) -> None:
        """Backward has come to ``block``, or would have on a rank that has none: send what lies
        behind it.
        """
        behind = self._left
        self._left = block
        leaving = self._inside[behind] if behind is not None else []
        counts = [m.casts - self._sums[m].sent if m.has_cast_all else 0 for m in self._outside]
        counts += [m.casts - self._sums[m].sent for m in leaving]
        self._send([*self._outside, *leaving], counts)

    def end_round(self, *, last: bool) -> None:
        """All ranks have trained on a micro-batch, or have none: send the rest, and wait for what
        comes.

        Args:
            last: of the step.
        """
        self._left = None
        modules = [*self._sums]
        self._send(
            modules, [module.casts - self._sums[module].sent for module in modules], last=last
        )
        self._arrive()

    def finish(self, module: TernaryModule) -> tuple[int, Tensor]:
        """How often all ranks have cast in a module in the step, and the sums of own rows, int16
        ``[n, K]``.

        The module's ``sums`` then have its exponents' votes of own rows where those of all rows
        would be.
        """
        sums = self._sums[module]
        sums.show_own_exponents()
        return sum(sums.casts_of), sums.own_votes

    def close(self) -> None:
        """There will be no further step: modules sum votes as those of one process do."""
        for module in self._sums:
            module.on_backward = None
            module.sum_votes()

    def _send(
        self, modules: Sequence[TernaryModule], own: Sequence[int], *, last: bool = False
    ) -> None:
        """Send the votes of so many casts in each module; receive what the others send of the same
        modules.
        """
        self._arrive()
        world = self._world
        if not modules:
            return
        for module, count in zip(modules, own, strict=True):
            StepSums.check(self._sums[module].sent + count, module.largest_vote)
        counts = torch.tensor(own, dtype=torch.int32)
        found = counts.new_empty(world.size * len(own))
        counted = all_gather_single(found, counts, group=world.group, async_op=True)
        pieces = [self._packed(modules, own, rank, last=last) for rank in range(world.size)]
        leaving = [sum(piece.numel() for piece in each) for each in pieces]
        nothing = torch.empty(0, dtype=torch.uint8, device=world.device)
        message = torch.cat([piece for each in pieces for piece in each] or [nothing])
        del pieces
        for module, count in zip(modules, own, strict=True):
            self._keep_own(module, count)
        counted.wait()
        casts_of = found.view(world.size, -1).tolist()
        for module, *casts in zip(modules, *casts_of, strict=True):
            sums = self._sums[module]
            sums.casts_of = [
                before + more for before, more in zip(sums.casts_of, casts, strict=True)
            ]
            StepSums.check(sum(sums.casts_of), module.largest_vote)
        sizes = [
            sum(p.size for _, p in self._own_parcels(modules, of, rank, last=last))
            for rank, of in enumerate(casts_of)
        ]
        received = message.new_empty(sum(sizes))
        work = dist.all_to_all_single(
            received, message, sizes, leaving, group=world.group, async_op=True
        )
        self._arriving = _Arriving(work, received, sizes, modules, casts_of, last)
        self.sent_bytes += counts.nbytes * (world.size - 1) + message.numel()

    def _packed(
        self, modules: Sequence[TernaryModule], casts: Sequence[int], rank: int, *, last: bool
    ) -> list[Tensor]:
        """The message to another rank."""
        if rank == self._world.rank:
            return []
        packed: list[Tensor] = []
        for module, count in zip(modules, casts, strict=True):
            sums = self._sums[module]
            rows = slice(*self._bounds[module][rank])
            learned = None if sums.own_exponent_votes is None else sums.exponent_votes[rows]
            parcels = [*vote_parcels(sums.votes[rows], learned, count, module.largest_vote)]
            if last and sums.bias is not None:
                parcels += bias_parcel(sums.bias[rows], module.casts)
            packed += [parcel.packed(module.backend) for parcel in parcels]
        return packed

    def _keep_own(self, module: TernaryModule, casts: int) -> None:
        """What this rank owns of what is being sent stays; the memory of the rest is free."""
        sums = self._sums[module]
        if casts:
            sums.own_votes += sums.votes[sums.rows]
            if sums.own_exponent_votes is not None:
                sums.own_exponent_votes += sums.exponent_votes[sums.rows]
            sums.sent += casts
            sums.release()

    def _arrive(self) -> None:
        """Wait for the message that is on its way, and add it to own rows."""
        coming = self._arriving
        self._arriving = None
        if coming is None:
            return
        coming.work.wait()
        messages = torch.split(coming.received, coming.sizes)
        for rank, (casts, message) in enumerate(zip(coming.casts, messages, strict=True)):
            place = 0
            for module, parcel in self._own_parcels(coming.modules, casts, rank, last=coming.last):
                parcel.add_(module.backend, message[place : place + parcel.size])
                place += parcel.size

    def _own_parcels(
        self, modules: Sequence[TernaryModule], casts: Sequence[int], rank: int, *, last: bool
    ) -> Iterator[tuple[TernaryModule, Parcel]]:
        """What comes from a rank that has cast so often since its last message, by the sums that it
        is added to.
        """
        if rank == self._world.rank:
            return
        for module, count in zip(modules, casts, strict=True):
            sums = self._sums[module]
            parcels = [
                *vote_parcels(sums.own_votes, sums.own_exponent_votes, count, module.largest_vote)
            ]
            if last and sums.bias is not None:
                parcels += bias_parcel(sums.bias[sums.rows], sums.casts_of[rank])
            yield from ((module, parcel) for parcel in parcels)
