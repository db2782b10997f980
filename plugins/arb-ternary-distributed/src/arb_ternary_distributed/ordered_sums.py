"""Sums over the micro-batches of a step in the order of their places, whoever computed them.

Floating-point addition is not associative: what an all-reduce gives depends on how many ranks there
are. In round ``i`` rank ``r`` of ``N`` has the micro-batch of place ``i * N + r``. It sends a slice
of its numbers to each rank; the owner of the slice adds what it is sent, in the order of ranks, to
the total of the rounds before. So every element is ``((g0 + g1) + g2) + ...``, as one process
computes it. The totals are gathered once, after the last round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from arb_ternary_distributed.collectives import all_gather_single

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup

# : Parts of a message begin at multiples of so many bytes, which numbers of every size can be read
# at.
_ALIGNED: Final = 16


class OrderedSums:
    """Sums of lists of tensors over rounds and ranks; used once.

    The tensors of a list are the same in shape, dtype and order on all ranks and in all rounds, on
    the world's device. Additions are made in a tensor's own dtype.

    Attributes:
        present: whether each tensor was present on any rank in any round so far.
    """

    def __init__(self, world: ProcessGroup) -> None:
        self._world = world
        self._layout: _Layout | None = None
        self.present: list[bool] = []

    @torch.no_grad()
    def add_round(self, tensors: Sequence[Tensor], present: bool | Sequence[bool]) -> None:
        """Add what all ranks have for this round. Collective; also of a rank that has nothing.

        Args:
            tensors: where one is not present, its numbers are not read.
            present: of each of them, or of all: whether this rank has it in this round. What is
                absent is passed over, which is not the same as adding zeros: ``-0.0 + 0.0`` is
                ``0.0``.
        """
        if self._layout is None:
            self._layout = _Layout.of(tensors, self._world.size)
            self.present = [False] * len(tensors)
            self._sent = self._layout.message(self._world.size, self._world.device)
            self._received = torch.empty_like(self._sent)
            self._total = self._layout.message(1, self._world.device)
        layout = self._layout
        flags = [present] * len(tensors) if isinstance(present, bool) else [*present]
        if not tensors:
            return
        layout.numbers_in(self._sent, tensors, flags)
        marks = self._sent[:, layout.marks : layout.marks + len(flags)]
        marks.copy_(torch.tensor(flags, dtype=torch.uint8).expand_as(marks))
        dist.all_to_all_single(self._received, self._sent, group=self._world.group)
        found = self._received[:, layout.marks : layout.marks + len(flags)].tolist()
        for sender, theirs in enumerate(found):
            for block, group in enumerate(layout.groups):
                total = group.slices(self._total)[0]
                added = group.slices(self._received)[sender]
                for start, end, began in layout.runs(block, self._world.rank, theirs, self.present):
                    if began:
                        total[start:end] += added[start:end]
                    else:
                        total[start:end] = added[start:end]
            self.present = [
                ours or bool(their) for ours, their in zip(self.present, theirs, strict=True)
            ]

    @torch.no_grad()
    def finish(self) -> list[Tensor]:
        """The sums, on every rank, new tensors of the layouts given; 0 where nobody had one.
        Collective.
        """
        layout = self._layout
        if layout is None or not layout.outlines:
            return []
        gathered = torch.empty_like(self._sent)
        all_gather_single(gathered, self._total, group=self._world.group)
        sums = [torch.zeros_like(outline, device=self._world.device) for outline in layout.outlines]
        layout.numbers_out(gathered, sums, self.present)
        return sums


@frozen(eq=False)
class _Group:
    """The tensors of one dtype: where they lie in the row of it all, which is cut into a slice a
    rank.
    """

    dtype: torch.dtype
    first_byte: int
    chunk: int
    # index of the tensor, its first place in the row, the one after its last
    members: tuple[tuple[int, int, int], ...]

    def slices(self, message: Tensor) -> Tensor:
        """The slices in a message, ``[its rows, chunk]``."""
        return message[
            :, self.first_byte : self.first_byte + self.chunk * self.dtype.itemsize
        ].view(self.dtype)

    def pieces(self, index: int, start: int, end: int) -> Iterator[tuple[int, slice, slice]]:
        """Of a tensor: rank, places in that rank's slice, places in the flat tensor."""
        for rank in range(start // self.chunk, -(-end // self.chunk)):
            low = max(start, rank * self.chunk)
            high = min(end, (rank + 1) * self.chunk)
            yield (
                rank,
                slice(low - rank * self.chunk, high - rank * self.chunk),
                slice(low - start, high - start),
            )


@frozen(eq=False)
class _Layout:
    """How a list of tensors is cut: a message has a row a rank, with a slice of each dtype and a
    mark a tensor.
    """

    outlines: tuple[Tensor, ...]
    groups: tuple[_Group, ...]
    marks: int
    width: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor], size: int) -> _Layout:
        outlines = tuple(torch.empty_like(tensor, device="meta") for tensor in tensors)
        groups = []
        end = 0
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            members = []
            place = 0
            for index, tensor in enumerate(tensors):
                if tensor.dtype == dtype and tensor.numel():
                    members.append((index, place, place + tensor.numel()))
                    place += tensor.numel()
            chunk = max(1, -(-place // size))
            groups.append(_Group(dtype, end, chunk, tuple(members)))
            end += -(-chunk * dtype.itemsize // _ALIGNED) * _ALIGNED
        return cls(outlines, tuple(groups), end, -(-(end + len(outlines)) // _ALIGNED) * _ALIGNED)

    def message(self, rows: int, device: torch.device) -> Tensor:
        """An empty one."""
        return torch.zeros(rows, self.width, dtype=torch.uint8, device=device)

    def numbers_in(self, message: Tensor, tensors: Sequence[Tensor], flags: Sequence[bool]) -> None:
        """Write the tensors that are present into a message."""
        for group in self.groups:
            slices = group.slices(message)
            for index, start, end in group.members:
                if flags[index]:
                    flat = tensors[index].reshape(-1)
                    for rank, there, here in group.pieces(index, start, end):
                        slices[rank, there] = flat[here]

    def numbers_out(
        self, message: Tensor, tensors: Sequence[Tensor], flags: Sequence[bool]
    ) -> None:
        """Read tensors from a message with everybody's slices."""
        for group in self.groups:
            slices = group.slices(message)
            for index, start, end in group.members:
                if flags[index]:
                    pieces = [
                        slices[rank, there] for rank, there, _ in group.pieces(index, start, end)
                    ]
                    tensors[index].copy_(torch.cat(pieces).view(tensors[index].shape))

    def runs(
        self, block: int, rank: int, marks: Sequence[int], begun: Sequence[bool]
    ) -> Iterator[tuple[int, int, bool]]:
        """Stretches of the slice of ``rank`` that are present: first place, the one after the last,
        if it had begun.
        """
        group = self.groups[block]
        first = rank * group.chunk
        last = (rank + 1) * group.chunk
        run: tuple[int, int, bool] | None = None
        for index, start, end in group.members:
            low = max(start, first) - first
            high = min(end, last) - first
            if low >= high or not marks[index]:
                continue
            if run is not None and run[1:] == (low, begun[index]):
                run = (run[0], high, begun[index])
                continue
            if run is not None:
                yield run
            run = (low, high, begun[index])
        if run is not None:
            yield run
