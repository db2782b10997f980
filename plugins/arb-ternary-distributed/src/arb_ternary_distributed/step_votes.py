"""The votes of a step on their way to the ranks that own their rows.

Modules are sent in blocks, in the opposite of their order, as backward reaches them: a block leaves
while backward computes the next ones. What leaves has no memory any more on this rank, except for
the rows that it owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from arb_ternary.ternary.module import TernaryModule
from arb_ternary.ternary.step_sums import StepSums
from arb_ternary_distributed.messages import VoteMessage
from arb_ternary_distributed.wire.buffers import VoteBuffer, vote_buffers
from arb_ternary_distributed.wire.rows import row_bounds

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup

#: Weights per block: enough for messages that are worth their latency.
_BLOCK: Final = 1 << 20


class StepVotes:
    """The votes of modules, step after step.

    Collective: every rank makes one for the same modules, and calls its methods in the same order.

    Args:
        world: the ranks.
        modules: which cast votes, in the same order on all ranks; their sums become
            :class:`RowSums`.
        every_round: whether votes are sent after every round of micro-batches, so that no rank
            keeps sums of all rows; else they are summed up to the last round of a step.
        during_backward: whether hooks of backward send votes; a compiled model calls none.
        block: least number of weights that travel together.
    """

    def __init__(
        self,
        world: ProcessGroup,
        modules: Sequence[TernaryModule],
        *,
        every_round: bool = False,
        during_backward: bool = True,
        block: int = _BLOCK,
    ) -> None:
        self._world = world
        self._every_round = every_round
        self._during_backward = during_backward
        self._blocks = _in_blocks(modules, block)
        self._bounds = {m: row_bounds(m.shape.out_features, world.size) for m in modules}
        self._sums: dict[TernaryModule, RowSums] = {}
        for module, bounds in self._bounds.items():
            sums = RowSums(module, slice(*bounds[world.rank]))
            module.sums = sums
            self._sums[module] = sums
        #: Blocks of this round whose casts are being gathered or were; None while none is sent.
        self._gathered: list[VoteMessage] | None = None
        #: Messages that were sent and not received yet.
        self._on_the_way: list[VoteMessage] = []

    def begin_step(self) -> None:
        """Drop what was sent for a step that was not taken."""
        for message in self._on_the_way:
            message.drop()
        self._on_the_way = []

    def begin_round(self, *, last: bool) -> None:
        """Begin a round of micro-batches, the last of its step or not."""
        sends = last or self._every_round
        self._gathered = [] if sends and self._during_backward else None
        for module, sums in self._sums.items():
            if self._during_backward:
                module.on_backward = partial(self._reach, sums)
            else:
                sums.allocate()

    def _reach(self, sums: RowSums) -> None:
        """Send blocks that have cast all their votes; backward is about to cast those of a module.

        Args:
            sums: of that module.
        """
        sums.allocate()
        while self._gathered is not None and len(self._gathered) < len(self._blocks):
            block = self._blocks[len(self._gathered)]
            if not all(module.has_cast_all for module in block):
                return
            self._advance(self._gathered, block)

    def _advance(self, gathered: list[VoteMessage], block: list[TernaryModule]) -> None:
        """Gather the casts of the next block, and send the block before it.

        The casts of that block have probably arrived by now, so that no rank waits for them.
        """
        casts = [module.casts - self._sums[module].sent for module in block]
        gathered.append(VoteMessage(self._world, block, casts))
        if len(gathered) > 1:
            self._send(gathered[-2])

    def end_round(self, *, last: bool) -> None:
        """Send the votes of this round that have not left, if it is one that sends.

        Called after backward, also on a rank without a micro-batch in this round.
        """
        for module in self._sums:
            module.on_backward = None
        if not last and not self._every_round:
            return
        gathered = [] if self._gathered is None else self._gathered
        self._gathered = None
        for block in self._blocks[len(gathered) :]:
            self._advance(gathered, block)
        if gathered:
            self._send(gathered[-1])
        if self._every_round:
            self.receive()

    def _send(self, message: VoteMessage) -> None:
        """Send the votes of a block, and free their memory."""
        if self._every_round:
            self.receive()
        modules = message.modules
        casts = message.wait_casts()
        for module, *of_ranks in zip(modules, *casts, strict=True):
            sums = self._sums[module]
            sums.total += sum(of_ranks)
            StepSums.check(sums.total, module.largest_vote)
        own_casts = casts[self._world.rank]
        outgoing: list[list[VoteBuffer]] = []
        incoming: list[list[VoteBuffer]] = []
        for rank in range(self._world.size):
            there = rank != self._world.rank
            outgoing.append(self._buffers(modules, own_casts, rank) if there else [])
            incoming.append(self._buffers(modules, casts[rank], None) if there else [])
        message.send(outgoing, incoming)
        self._on_the_way.append(message)
        for module, count in zip(modules, own_casts, strict=True):
            self._sums[module].keep_own(count)

    def _buffers(
        self, modules: Sequence[TernaryModule], casts: Sequence[int], owner: int | None
    ) -> list[VoteBuffer]:
        """Return the sums of the rows that a rank owns; None = what this rank has received."""
        found: list[VoteBuffer] = []
        for module, count in zip(modules, casts, strict=True):
            sums = self._sums[module]
            rows = sums.rows if owner is None else slice(*self._bounds[module][owner])
            votes = sums.own_votes if owner is None else sums.votes[rows]
            exponents = None if module.voting_exponents() is None else sums.exponent_votes[rows]
            bias = None if sums.bias is None else sums.bias[rows]
            found += vote_buffers(module, votes, exponents, bias, count)
        return found

    def receive(self) -> None:
        """Wait for the votes that are on their way, and add them to the sums of own rows."""
        for message in self._on_the_way:
            message.receive()
        self._on_the_way = []

    def take(self, module: TernaryModule) -> Tensor:
        """Return the sums of own rows of a module, int16 ``[n, K]``, after the last round.

        Its ``sums`` then hold the casts of all ranks, and in own rows the sums of the rest.
        """
        self.receive()
        sums = self._sums[module]
        sums.casts = sums.total
        return sums.own_votes


class RowSums(StepSums):
    """Sums of a step whose matrix of all rows has memory only from a cast until it is sent.

    A state that an op was given in forward refers to ``votes``, so it stays the same tensor.
    Between :meth:`free` and :meth:`allocate` it has one element, and nothing can be written to it
    (RuntimeError).

    Args:
        module: whose sums they are; its former sums are dropped.
        rows: rows of this rank.

    Attributes:
        rows: rows of this rank.
        sent: casts of this rank that have been sent in this step.
        total: casts of all ranks that have been sent in this step.
    """

    def __init__(self, module: TernaryModule, rows: slice) -> None:
        has_bias = getattr(module, "bias_votes", None) is not None
        scaled = module.magnitudes is not None
        super().__init__(module.shape, module.weight.device, bias=has_bias, magnitudes=scaled)
        self.rows = rows
        self.sent = 0
        self.total = 0
        self._own: Tensor | None = None
        self.free()

    @property
    def own_votes(self) -> Tensor:
        """int16 ``[n, K]``: the votes for own rows that all ranks have sent in this step."""
        if self._own is None:
            shape = self.votes[self.rows].shape
            self._own = torch.zeros(shape, dtype=self.votes.dtype, device=self.votes.device)
        return self._own

    def allocate(self) -> None:
        """Give the matrix of all rows memory, zeros, before votes are cast."""
        if not self.votes.is_contiguous():
            zeros = torch.zeros(self.votes.shape, dtype=self.votes.dtype, device=self.votes.device)
            self.votes.set_(zeros)  # type: ignore[call-overload]

    def free(self) -> None:
        """Free the memory of the matrix of all rows."""
        one = torch.zeros(1, dtype=self.votes.dtype, device=self.votes.device)
        self.votes.set_(one.untyped_storage(), 0, self.votes.shape, (0, 0))

    def keep_own(self, casts: int) -> None:
        """Keep the sums of own rows of what is being sent, and drop the rest."""
        if not casts:
            return
        self.own_votes.add_(self.votes[self.rows])
        self.free()
        for small in (self.exponent_votes, self.bias):
            if small is not None:
                small[: self.rows.start] = 0
                small[self.rows.stop :] = 0
        self.sent += casts

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that have memory, by name."""
        found = super().tensors()
        return {name: tensor for name, tensor in found.items() if tensor.is_contiguous()}

    def clear(self) -> None:
        """Start a step."""
        self.free()
        self._own = None
        super().clear()
        self.sent = 0
        self.total = 0


def _in_blocks(modules: Sequence[TernaryModule], least: int) -> list[list[TernaryModule]]:
    """Group neighbours of at least ``least`` weights, the last modules first."""
    blocks: list[list[TernaryModule]] = []
    size = least
    for module in reversed(modules):
        if size >= least:
            blocks.append([])
            size = 0
        blocks[-1].append(module)
        size += module.shape.out_features * module.shape.in_features
    return blocks
