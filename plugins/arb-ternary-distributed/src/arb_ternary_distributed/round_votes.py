"""Votes that are sent in every round of micro-batches, for ranks that keep only some rows.

Votes that wait for the end of a step need a sum for every row on every rank. Here the sums of a
block are sent when backward has left it, and their memory is freed; the owner adds what arrives to
the sums of its rows, which it keeps over the rounds. A module outside of blocks is sent with the
next block once it has cast all its votes of the round (a head), or at the end of the round (an
embedding, also one that is the head too).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from arb_ternary.ternary.module import TernaryModule
from arb_ternary.ternary.step_sums import StepSums
from arb_ternary_distributed.messages import VoteMessage
from arb_ternary_distributed.wire.buffers import VoteBuffer, bias_buffer, vote_buffers
from arb_ternary_distributed.wire.rows import row_bounds

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup


class RoundVotes:
    """The votes of modules, step after step.

    Collective: all ranks make one, and call its methods in the same order.

    Args:
        world: the ranks.
        modules: which cast votes; their sums become :class:`RowSums`.
        blocks: which backward leaves one after the other.

    Attributes:
        sent_bytes: bytes that this rank has handed to the network so far.
    """

    def __init__(
        self,
        world: ProcessGroup,
        modules: Sequence[TernaryModule],
        blocks: Sequence[nn.Module],
    ) -> None:
        self._world = world
        self._bounds = {m: row_bounds(m.shape.out_features, world.size) for m in modules}
        self._sums: dict[TernaryModule, RowSums] = {}
        for module, bounds in self._bounds.items():
            sums = RowSums(module, slice(*bounds[world.rank]), world.size)
            module.sums = sums
            module.on_backward = sums.allocate
            self._sums[module] = sums
        self._inside = {
            block: [part for part in block.modules() if part in self._sums] for block in blocks
        }
        within = {module for parts in self._inside.values() for module in parts}
        self._outside = [module for module in modules if module not in within]
        self._left: nn.Module | None = None
        self._message: VoteMessage | None = None
        self.sent_bytes = 0

    def reach(self, block: nn.Module) -> None:
        """Send the votes of the block that backward has left, because it has come to ``block``.

        Also called by a rank without a backward pass in this round.
        """
        behind = self._left
        self._left = block
        leaving = self._inside[behind] if behind is not None else []
        casts = [self._unsent(module) if module.has_cast_all else 0 for module in self._outside]
        casts += [self._unsent(module) for module in leaving]
        self._send([*self._outside, *leaving], casts)

    def end_round(self, *, last: bool) -> None:
        """Send the remaining votes of this round, and wait for those of the other ranks.

        Args:
            last: whether this is the last round of the step.
        """
        self._left = None
        modules = [*self._sums]
        self._send(modules, [self._unsent(module) for module in modules], last=last)
        self._receive()

    def finish(self, module: TernaryModule) -> tuple[int, Tensor]:
        """Return the casts of all ranks in a module and the sums of own rows, int16 ``[n, K]``.

        Own rows of ``exponent_votes`` in the module's ``sums`` then hold its sums too.
        """
        sums = self._sums[module]
        sums.show_own_exponents()
        return sum(sums.casts_of), sums.own_votes

    def close(self) -> None:
        """Let modules sum votes as those of one process do, after the last step."""
        for module in self._sums:
            module.on_backward = None
            module.sum_votes()

    def _unsent(self, module: TernaryModule) -> int:
        """Return how often this rank has cast in a module since it last sent its votes."""
        return module.casts - self._sums[module].sent

    def _send(
        self,
        modules: Sequence[TernaryModule],
        casts: Sequence[int],
        *,
        last: bool = False,
    ) -> None:
        """Send the votes of the given casts of each module, and receive those of other ranks."""
        self._receive()
        if not modules:
            return
        for module, count in zip(modules, casts, strict=True):
            StepSums.check(self._sums[module].sent + count, module.largest_vote)
        message = VoteMessage(self._world, modules, casts)
        message.pack(lambda module, count, rank: self._outgoing(module, count, rank, last))
        for module, count in zip(modules, casts, strict=True):
            self._sums[module].keep_own(count)
        for rank, of_rank in enumerate(message.casts):
            for module, count in zip(modules, of_rank, strict=True):
                self._sums[module].casts_of[rank] += count
        for module in modules:
            StepSums.check(sum(self._sums[module].casts_of), module.largest_vote)
        message.send(lambda module, count, sender: self._incoming(module, count, sender, last))
        self._message = message
        self.sent_bytes += message.sent_bytes

    def _receive(self) -> None:
        """Wait for the message that is on its way, and add it to own rows."""
        if self._message is not None:
            self._message.receive()
            self._message = None

    def _outgoing(
        self,
        module: TernaryModule,
        casts: int,
        rank: int,
        last: bool,
    ) -> Iterable[VoteBuffer]:
        """Yield the sums of the rows that another rank owns; of a bias in the last round."""
        sums = self._sums[module]
        rows = slice(*self._bounds[module][rank])
        exponents = None
        if sums.own_exponent_votes is not None:
            exponents = sums.exponent_votes[rows]
        yield from vote_buffers(sums.votes[rows], exponents, casts, module.largest_vote)
        if last and sums.bias is not None:
            yield from bias_buffer(sums.bias[rows], module.casts)

    def _incoming(
        self,
        module: TernaryModule,
        casts: int,
        sender: int,
        last: bool,
    ) -> Iterable[VoteBuffer]:
        """Yield the sums of own rows, to which the votes of another rank are added."""
        sums = self._sums[module]
        yield from vote_buffers(sums.own_votes, sums.own_exponent_votes, casts, module.largest_vote)
        if last and sums.bias is not None:
            yield from bias_buffer(sums.bias[sums.rows], sums.casts_of[sender])


class RowSums(StepSums):
    """Sums of a step whose matrices of all rows have memory only from a cast until they are sent.

    A state that an op was given in forward refers to ``votes`` and ``exponent_votes``, so they stay
    the same tensors. Between :meth:`free` and :meth:`allocate` they have one element, and nothing
    can be written to them (RuntimeError).

    Args:
        module: whose sums they are; its former sums are dropped.
        rows: rows of this rank.
        size: number of ranks.

    Attributes:
        rows: rows of this rank.
        own_votes: int16 ``[n, K]``, votes for own rows that all ranks have sent in this step.
        own_exponent_votes: the same for exponents, int32 ``[n, J]``; None if the exponents do not
            learn.
        sent: casts of this rank that have been sent.
        casts_of: casts of each rank that have been sent.
    """

    def __init__(self, module: TernaryModule, rows: slice, size: int) -> None:
        has_bias = getattr(module, "bias_votes", None) is not None
        scaled = module.magnitudes is not None
        super().__init__(module.shape, module.weight.device, bias=has_bias, magnitudes=scaled)
        self.rows = rows
        self.own_votes = torch.zeros_like(self.votes[rows])
        self.own_exponent_votes: Tensor | None = None
        if module.voting_exponents() is not None:
            self.own_exponent_votes = torch.zeros_like(self.exponent_votes[rows])
        self.sent = 0
        self.casts_of = [0] * size
        self.free()

    def allocate(self) -> None:
        """Give the matrices of all rows memory, zeros, before votes are cast."""
        if self.votes.is_contiguous():
            return
        _allocate(self.votes)
        if self.own_exponent_votes is not None:
            _allocate(self.exponent_votes)

    def free(self) -> None:
        """Free the memory of the matrices of all rows."""
        for matrix in (self.votes, self.exponent_votes):
            one = torch.zeros(1, dtype=matrix.dtype, device=matrix.device)
            matrix.set_(one.untyped_storage(), 0, matrix.shape, (0, 0))

    def keep_own(self, casts: int) -> None:
        """Add own rows of what is being sent to the sums of own rows, and free the rest."""
        if not casts:
            return
        self.own_votes += self.votes[self.rows]
        if self.own_exponent_votes is not None:
            self.own_exponent_votes += self.exponent_votes[self.rows]
        self.sent += casts
        self.free()

    def show_own_exponents(self) -> None:
        """Copy the sums of own rows into ``exponent_votes``, until :meth:`free`."""
        if self.own_exponent_votes is not None:
            _allocate(self.exponent_votes)
            self.exponent_votes[self.rows] = self.own_exponent_votes

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that have memory, by name."""
        found = super().tensors()
        return {name: tensor for name, tensor in found.items() if tensor.is_contiguous()}

    def clear(self) -> None:
        """Start a step."""
        self.free()
        super().clear()
        self.sent = 0
        self.casts_of = [0] * len(self.casts_of)


def _allocate(matrix: Tensor) -> None:
    """Give ``matrix`` memory of its own, zeros."""
    zeros = torch.zeros(matrix.shape, dtype=matrix.dtype, device=matrix.device)
    matrix.set_(zeros)  # type: ignore[call-overload]
