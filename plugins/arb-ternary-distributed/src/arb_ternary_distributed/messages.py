"""Messages with votes, from every rank to the ranks that own the rows.

A message holds, for each module, the receiver's rows of what the sender has summed. Its length
follows from how often the sender has cast, which is gathered first. All ranks send messages about
the same modules in the same order, so that nothing has to say what a message is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from arb_ternary.ternary.module import TernaryModule
from arb_ternary_distributed.collectives import all_gather_single
from arb_ternary_distributed.wire.buffers import VoteBuffer

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup


class VoteMessage:
    """The votes of some modules on their way between all ranks. Collective.

    Its methods are called in the order :meth:`wait_casts`, :meth:`send` and :meth:`receive`.

    Args:
        world: the ranks.
        modules: whose votes are sent, the same on all ranks.
        casts: how often this rank has cast in each module since it last sent votes of it.

    Attributes:
        modules: whose votes are sent.
    """

    def __init__(
        self,
        world: ProcessGroup,
        modules: Sequence[TernaryModule],
        casts: Sequence[int],
    ) -> None:
        self._world = world
        self.modules = modules
        # Numbers on the host: no rank waits for its GPU to send them.
        own = torch.tensor(casts, dtype=torch.int32)
        self._casts = own.new_empty(world.size * len(casts))
        self._work: Any = all_gather_single(self._casts, own, group=world.group, async_op=True)

    def wait_casts(self) -> list[list[int]]:
        """Return how often each rank has cast in each module; waits for the ranks."""
        self._work.wait()
        casts: list[list[int]] = self._casts.view(self._world.size, -1).tolist()
        return casts

    def send(
        self,
        outgoing: Sequence[Sequence[VoteBuffer]],
        incoming: Sequence[Sequence[VoteBuffer]],
    ) -> None:
        """Begin to exchange messages.

        Args:
            outgoing: for each rank the sums of its rows, which may change afterwards.
            incoming: for each rank what its message is added to.
        """
        packed = [[buffer.pack() for buffer in buffers] for buffers in outgoing]
        nothing = torch.empty(0, dtype=torch.uint8, device=self._world.device)
        message = torch.cat([nothing, *(piece for pieces in packed for piece in pieces)])
        self._incoming = incoming
        self._sizes = [sum(buffer.size for buffer in buffers) for buffers in incoming]
        self._received = message.new_empty(sum(self._sizes))
        self._work = dist.all_to_all_single(
            self._received,
            message,
            self._sizes,
            [sum(piece.numel() for piece in pieces) for pieces in packed],
            group=self._world.group,
            async_op=True,
        )
        # It is read until it has been sent.
        self._message = message

    def receive(self) -> None:
        """Wait for the messages of all ranks, and add them to the sums of own rows."""
        self._work.wait()
        start = 0
        for buffers in self._incoming:
            for buffer in buffers:
                buffer.add_(self._received[start : start + buffer.size])
                start += buffer.size

    def drop(self) -> None:
        """Wait for the messages of all ranks, and ignore them."""
        self._work.wait()
