"""Messages with votes, from every rank to the ranks that own the rows.

A message holds, for each module, the receiver's rows of what the sender has summed. Its length
follows from how often the sender has cast, which is gathered first. All ranks send messages about
the same modules in the same order, so that nothing has to say what a message is about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from arb_ternary.ternary.module import TernaryModule
from arb_ternary_distributed.collectives import all_gather_single
from arb_ternary_distributed.wire.buffers import VoteBuffer

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup

#: Yields the buffers of a module: ``buffers(module, casts of the sender, the other rank)``.
Buffers = Callable[[TernaryModule, int, int], Iterable[VoteBuffer]]


class VoteMessage:
    """The votes of some modules on their way between all ranks. Collective.

    Its methods are called in the order :meth:`pack`, :meth:`send` and :meth:`receive`.

    Args:
        world: the ranks.
        modules: whose votes are sent, the same on all ranks.
        casts: how often this rank has cast in each module since it last sent votes of it.

    Attributes:
        sent_bytes: bytes that this rank has handed to the network.
    """

    def __init__(
        self,
        world: ProcessGroup,
        modules: Sequence[TernaryModule],
        casts: Sequence[int],
    ) -> None:
        self._world = world
        self._modules = modules
        self._own_casts = casts
        # Numbers on the host: no rank waits for its GPU to send them.
        own = torch.tensor(casts, dtype=torch.int32)
        self._gathered_casts = own.new_empty(world.size * len(casts))
        self._work: Any = all_gather_single(
            self._gathered_casts,
            own,
            group=world.group,
            async_op=True,
        )
        self._casts: list[list[int]] | None = None
        self.sent_bytes = own.nbytes * (world.size - 1)

    @property
    def casts(self) -> list[list[int]]:
        """How often each rank has cast in each module; waits for the ranks."""
        if self._casts is None:
            self._work.wait()
            self._casts = self._gathered_casts.view(self._world.size, -1).tolist()
        return self._casts

    def total_casts(self) -> Iterator[tuple[TernaryModule, int]]:
        """Yield the modules, and how often all ranks have cast in each; waits for the ranks."""
        for module, *casts in zip(self._modules, *self.casts, strict=True):
            yield module, sum(casts)

    def pack(self, buffers: Buffers) -> None:
        """Pack the sums of this rank; ``buffers`` yields those of the rows that a rank owns."""
        pieces = [torch.empty(0, dtype=torch.uint8, device=self._world.device)]
        self._lengths = [0] * self._world.size
        for rank in range(self._world.size):
            if rank == self._world.rank:
                continue
            for module, casts in zip(self._modules, self._own_casts, strict=True):
                for buffer in buffers(module, casts, rank):
                    pieces.append(buffer.pack(module.backend))
                    self._lengths[rank] += pieces[-1].numel()
        self._message = torch.cat(pieces)

    def send(self, buffers: Buffers) -> None:
        """Begin to exchange messages; ``buffers`` yields what is added to, by sender."""
        self._buffers = buffers
        sizes = [
            sum(buffer.size for _, buffer in self._incoming(sender))
            for sender in range(self._world.size)
        ]
        self._received = self._message.new_empty(sum(sizes))
        self._sizes = sizes
        self._work = dist.all_to_all_single(
            self._received,
            self._message,
            sizes,
            self._lengths,
            group=self._world.group,
            async_op=True,
        )
        self.sent_bytes += sum(self._lengths)

    def receive(self) -> None:
        """Wait for the messages of all ranks, and add them to the sums of own rows."""
        self._work.wait()
        for sender, message in enumerate(torch.split(self._received, self._sizes)):
            start = 0
            for module, buffer in self._incoming(sender):
                buffer.add_(module.backend, message[start : start + buffer.size])
                start += buffer.size

    def drop(self) -> None:
        """Wait for the messages of all ranks, and ignore them."""
        self._work.wait()

    def _incoming(self, sender: int) -> Iterable[tuple[TernaryModule, VoteBuffer]]:
        """Yield what a message of ``sender`` is added to."""
        if sender == self._world.rank:
            return
        for module, casts in zip(self._modules, self.casts[sender], strict=True):
            for buffer in self._buffers(module, casts, sender):
                yield module, buffer
