"""The votes of one step, sent to the ranks that own their rows when the step ends.

Modules are sent in blocks, in the opposite of their order, as backward reaches them: a block leaves
while backward computes the next ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from arb_ternary.ternary.module import TernaryModule
from arb_ternary.ternary.step_sums import StepSums
from arb_ternary_distributed.messages import VoteMessage
from arb_ternary_distributed.wire.buffers import VoteBuffer, bias_buffer, vote_buffers
from arb_ternary_distributed.wire.rows import row_bounds

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup

#: Weights per block: enough for messages that are worth their latency.
_BLOCK: Final = 1 << 20


class StepVotes:
    """The votes of one step. Collective: every rank makes one for the same modules.

    Args:
        world: the ranks.
        modules: which sum their votes, in the same order on all ranks.
        block: least number of weights that travel together.
    """

    def __init__(
        self,
        world: ProcessGroup,
        modules: Sequence[TernaryModule],
        *,
        block: int = _BLOCK,
    ) -> None:
        self._world = world
        self._blocks = _in_blocks(modules, block)
        self._bounds = {m: row_bounds(m.shape.out_features, world.size) for m in modules}
        # No step changes the largest vote of a cast midway.
        self._largest = {module: module.largest_vote for module in modules}
        #: Of the blocks whose casts are being gathered or were.
        self._messages: list[VoteMessage] = []
        self._sent = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has handed to the network."""
        return sum(message.sent_bytes for message in self._messages)

    def send_during_backward(self) -> None:
        """Send each block as soon as backward has cast all its votes.

        Called before the last micro-batch of the step.
        """
        for module in self._bounds:
            module.on_backward = self._poll

    def _poll(self) -> None:
        while len(self._messages) < len(self._blocks):
            block = self._blocks[len(self._messages)]
            if not all(module.has_cast_all for module in block):
                return
            self._advance(block)

    def _advance(self, block: list[TernaryModule]) -> None:
        """Gather the casts of the next block, and send the block before it.

        The casts of that block have probably arrived by now, so that no rank waits for them.
        """
        casts = [module.casts for module in block]
        self._messages.append(VoteMessage(self._world, block, casts))
        if len(self._messages) > 1:
            self._send_next()

    def flush(self) -> None:
        """Send the remaining blocks after backward has ended."""
        for module in self._bounds:
            module.on_backward = None
        for block in self._blocks[len(self._messages) :]:
            self._advance(block)
        if self._sent < len(self._blocks):
            self._send_next()

    def _send_next(self) -> None:
        message = self._messages[self._sent]
        for module, casts in message.total_casts():
            StepSums.check(casts, self._largest[module])
        message.pack(self._buffers)
        message.send(lambda module, casts, _: self._buffers(module, casts, self._world.rank))
        self._sent += 1

    def finish(self) -> dict[TernaryModule, int]:
        """Add what has arrived to the sums of own rows.

        Returns:
            How often all ranks have cast in each module.
        """
        self.flush()
        total: dict[TernaryModule, int] = {}
        for message in self._messages:
            message.receive()
            total.update(message.total_casts())
        return total

    def drop(self) -> None:
        """Ignore what is on its way; called after :meth:`flush`."""
        for message in self._messages:
            message.drop()

    def _buffers(self, module: TernaryModule, casts: int, rank: int) -> Iterable[VoteBuffer]:
        """Yield the module's sums of the rows that ``rank`` owns; none without casts."""
        sums = module.sums
        assert sums is not None
        rows = slice(*self._bounds[module][rank])
        exponents = None
        if module.voting_exponents() is not None:
            exponents = sums.exponent_votes[rows]
        yield from vote_buffers(sums.votes[rows], exponents, casts, self._largest[module])
        if sums.bias is not None:
            yield from bias_buffer(sums.bias[rows], casts)


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
