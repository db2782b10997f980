"""Votes on their way to the ranks that own their rows, block by block, while backward still
computes others.

A message holds, for each module, the owner's rows of what the sender has summed over its
micro-batches (``parcels``). How long it is follows from how often the sender has cast, which is
gathered first. Modules are taken in blocks, in the opposite of their order, as backward reaches
them; every rank sends the same blocks in the same order, so that nothing has to be said about what
a message is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from arb_ternary.ternary.module import TernaryModule
from arb_ternary.ternary.step_sums import StepSums
from arb_ternary_distributed.buffers import Parcel, bias_parcel, vote_parcels
from arb_ternary_distributed.collectives import all_gather_single
from arb_ternary_distributed.rows import row_bounds

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup

#: Weights of a block: enough for messages that are worth their latency.
_BLOCK: Final = 1 << 20


@define(eq=False)
class _Block:
    """Modules whose votes travel together."""

    modules: list[TernaryModule]
    casts: Tensor | None = None  # of all ranks, int32 [ranks * modules]
    received: Tensor | None = None
    sizes: list[int] = field(factory=list)
    work: Any = None


class Delivery:
    """The votes of one step. Collective: every rank makes one for the same modules, and finishes
    it.

    Args:
        world: the ranks.
        modules: which sum their votes, in an order that is that of all ranks.
        block: weights that travel together, at least.

    Attributes:
        sent_bytes: that this rank has handed to the network.
    """

    def __init__(
        self, world: ProcessGroup, modules: Sequence[TernaryModule], *, block: int = _BLOCK
    ) -> None:
        self._world = world
        self._blocks = _in_blocks(modules, block)
        # Of each module: the bounds of all ranks' rows, and the largest vote of a cast, which no
        # step changes midway.
        self._known = {
            m: (row_bounds(m.shape.out_features, world.size), m.largest_vote) for m in modules
        }
        self._counted = self._sent = 0
        self.sent_bytes = 0

    # --- while backward runs

    def watch(self) -> None:
        """Send blocks from now on as soon as backward has cast all of their votes: this micro-batch
        is the last.
        """
        for block in self._blocks:
            for module in block.modules:
                module.on_backward = self._poll

    def _poll(self) -> None:
        while self._counted < len(self._blocks) and all(
            m.has_cast_all for m in self._blocks[self._counted].modules
        ):
            self._advance()

    def _advance(self) -> None:
        """Count the casts of the next block, and send the one before it, whose casts should be
        known by now.
        """
        self._count(self._blocks[self._counted])
        self._counted += 1
        if self._counted > 1:
            self._send(self._blocks[self._counted - 2])
            self._sent += 1

    def flush(self) -> None:
        """Backward has ended: send the rest."""
        for block in self._blocks:
            for module in block.modules:
                module.on_backward = None
        while self._counted < len(self._blocks):
            self._advance()
        if self._sent < len(self._blocks):
            self._send(self._blocks[self._sent])
            self._sent += 1

    def finish(self) -> dict[TernaryModule, int]:
        """Wait, add what has come to the sums of own rows, and return how often all ranks have cast
        in each module.
        """
        self.flush()
        total: dict[TernaryModule, int] = {}
        for block in self._blocks:
            assert block.casts is not None
            assert block.received is not None
            block.work.wait()
            casts = block.casts.view(self._world.size, -1).tolist()
            for of, message in zip(casts, torch.split(block.received, block.sizes), strict=True):
                self._add(block.modules, of, message)
            total |= {
                module: sum(of[index] for of in casts) for index, module in enumerate(block.modules)
            }
        return total

    def drop(self) -> None:
        """Wait for what is on its way, and forget it; after :meth:`flush`."""
        for block in self._blocks:
            block.work.wait()

    # --- one block

    def _count(self, block: _Block) -> None:
        world = self._world
        own = torch.tensor(
            [module.casts for module in block.modules], dtype=torch.int32, device=world.device
        )
        block.casts = own.new_empty(world.size * len(own))
        block.work = all_gather_single(block.casts, own, group=world.group, async_op=True)
        self.sent_bytes += own.nbytes * (world.size - 1)

    def _send(self, block: _Block) -> None:
        world = self._world
        assert block.casts is not None
        block.work.wait()
        casts = block.casts.view(self._world.size, -1).tolist()
        for module, *of in zip(block.modules, *casts, strict=True):
            StepSums.check(sum(of), self._known[module][1])
        own = casts[world.rank]
        pieces = [
            self._packed(block.modules, own, rank) if rank != world.rank else []
            for rank in range(world.size)
        ]
        leaving = [sum(piece.numel() for piece in each) for each in pieces]
        block.sizes = [
            self._length(block.modules, of, world.rank) if rank != world.rank else 0
            for rank, of in enumerate(casts)
        ]
        nothing = torch.empty(0, dtype=torch.uint8, device=world.device)
        message = torch.cat([piece for each in pieces for piece in each] or [nothing])
        block.received = message.new_empty(sum(block.sizes))
        block.work = dist.all_to_all_single(
            block.received, message, block.sizes, leaving, group=world.group, async_op=True
        )
        self.sent_bytes += sum(leaving)

    def _parcels(self, module: TernaryModule, casts: int, rank: int) -> Iterable[Parcel]:
        """What rank ``rank`` owns of the module's sums; nothing without casts."""
        sums = module.sums
        assert sums is not None
        bounds, largest = self._known[module]
        rows = slice(*bounds[rank])
        learned = None if module.voting_exponents() is None else sums.exponent_votes[rows]
        yield from vote_parcels(sums.votes[rows], learned, casts, largest)
        yield from bias_parcel(None if sums.bias is None else sums.bias[rows], casts)

    def _packed(
        self, modules: Sequence[TernaryModule], casts: Sequence[int], rank: int
    ) -> list[Tensor]:
        """The message to a rank."""
        return [
            parcel.packed(module.backend)
            for module, cast in zip(modules, casts, strict=True)
            for parcel in self._parcels(module, cast, rank)
        ]

    def _length(self, modules: Sequence[TernaryModule], casts: Sequence[int], rank: int) -> int:
        """Bytes of a message to ``rank`` from one who has cast so often."""
        return sum(
            parcel.size
            for module, cast in zip(modules, casts, strict=True)
            for parcel in self._parcels(module, cast, rank)
        )

    def _add(self, modules: Sequence[TernaryModule], casts: Sequence[int], message: Tensor) -> None:
        """Add what a rank that has cast so often sent to the sums of own rows."""
        if not message.numel():
            return
        place = 0
        for module, cast in zip(modules, casts, strict=True):
            for parcel in self._parcels(module, cast, self._world.rank):
                parcel.add_(module.backend, message[place : place + parcel.size])
                place += parcel.size


def _in_blocks(modules: Sequence[TernaryModule], least: int) -> list[_Block]:
    """Neighbours of at least so many weights, last first."""
    blocks: list[_Block] = []
    size = least
    for module in reversed(modules):
        if size >= least:
            blocks.append(_Block([]))
            size = 0
        blocks[-1].modules.append(module)
        size += module.shape.out_features * module.shape.in_features
    return blocks
