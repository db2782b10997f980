"""Sums of float tensors over the micro-batches of a step, which several ranks have computed.

Floating-point addition is not associative: the result of an all-reduce depends on the number of
ranks. :class:`OrderedSums` therefore adds in the order of micro-batches. In round ``i`` rank ``r``
of ``N`` has the micro-batch with index ``i * N + r``. It sends a slice of its numbers to each rank;
the owner of a slice adds what it receives, in the order of ranks, to the total of the rounds
before. So every element is ``((g0 + g1) + g2) + ...``, as one process computes it. The totals are
gathered once, after the last round. :class:`AllReduceSums` sends less, and gives other bytes.
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

#: Parts of a message begin at multiples of this number of bytes, where numbers of every size can be
#: read.
_ALIGNED: Final = 16


class OrderedSums:
    """Sums of lists of tensors over rounds and ranks, in the order of micro-batches; used once.

    The tensors of a list have the same shapes, dtypes and order on all ranks and in all rounds, and
    are on the world's device. Additions are made in a tensor's own dtype.

    Attributes:
        present: whether each tensor was present on any rank in any round so far.
    """

    def __init__(self, world: ProcessGroup) -> None:
        self._world = world
        self._layout: _Layout | None = None
        self.present: list[bool] = []

    @torch.no_grad()
    def add_round(self, tensors: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Add the tensors that all ranks have in this round. Collective.

        A tensor that is not present is passed over, which is not the same as adding zeros: ``-0.0 +
        0.0`` is ``0.0``.

        Args:
            tensors: of this rank; the numbers of those that are not present are ignored.
            present: whether this rank has each tensor in this round.
        """
        if self._layout is None:
            self._layout = _layout(tensors, self._world.size)
            self.present = [False] * len(tensors)
            self._sent = self._layout.new_message(self._world.size, self._world.device)
            self._received = torch.empty_like(self._sent)
            self._total = self._layout.new_message(1, self._world.device)
        layout = self._layout
        if not tensors:
            return

        layout.write(self._sent, tensors)
        marks = slice(layout.marks, layout.marks + len(tensors))
        own_marks = torch.tensor(present, dtype=torch.uint8)
        self._sent[:, marks] = own_marks.to(self._sent.device)
        dist.all_to_all_single(self._received, self._sent, group=self._world.group)

        # Which rank has which tensor in this round, in one transfer to the host.
        received_marks = self._received[:, marks].tolist()
        for sender, sent in enumerate(received_marks):
            for group in layout.groups:
                total = group.chunks(self._total)[0]
                added = group.chunks(self._received)[sender]
                runs = group.present_runs(self._world.rank, sent, self.present)
                for start, end, has_begun in runs:
                    if has_begun:
                        total[start:end] += added[start:end]
                    else:
                        total[start:end] = added[start:end]
            for index, mark in enumerate(sent):
                if mark:
                    self.present[index] = True

    @torch.no_grad()
    def finish(self) -> list[Tensor]:
        """Return the sums, new tensors on every rank; 0 if no rank had a tensor. Collective."""
        layout = self._layout
        if layout is None or not layout.outlines:
            return []
        gathered = torch.empty_like(self._sent)
        all_gather_single(gathered, self._total, group=self._world.group)
        return layout.read(gathered)


class AllReduceSums:
    """Sums as :class:`OrderedSums`, except that the first tensors go through one all-reduce.

    Args:
        world: the ranks.
        first: number of tensors that are reduced. Those that follow are small and decide votes, and
            are added in order.
    """

    def __init__(self, world: ProcessGroup, first: int) -> None:
        self._world = world
        self._first = first
        self._ordered = OrderedSums(world)
        self._totals: list[Tensor | None] = [None] * first
        self._outlines: Sequence[Tensor] = ()
        self.present: list[bool] = []

    @torch.no_grad()
    def add_round(self, tensors: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Add the tensors of this round; see :meth:`OrderedSums.add_round`. Collective.

        The first tensors are kept, and added to.
        """
        self._outlines = tensors[: self._first]
        for index, tensor in enumerate(self._outlines):
            if present[index]:
                total = self._totals[index]
                self._totals[index] = tensor if total is None else total.add_(tensor)
        self._ordered.add_round(tensors[self._first :], present[self._first :])

    @torch.no_grad()
    def finish(self) -> list[Tensor]:
        """Return the sums, on every rank; 0 if no rank had a tensor. Collective."""
        group = self._world.group
        own = [total is not None for total in self._totals]
        marks = torch.tensor(own, dtype=torch.uint8, device=self._world.device)
        if own:
            dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=group)
        present = [bool(mark) for mark in marks.tolist()]

        sums = []
        for total, outline in zip(self._totals, self._outlines, strict=True):
            sums.append(torch.zeros_like(outline) if total is None else total)
        reduced = [total for total, there in zip(sums, present, strict=True) if there]
        for dtype in dict.fromkeys(total.dtype for total in reduced):
            members = [total for total in reduced if total.dtype == dtype]
            flat = torch.cat([member.reshape(-1) for member in members])
            dist.all_reduce(flat, group=group)
            pieces = torch.split(flat, [member.numel() for member in members])
            for member, piece in zip(members, pieces, strict=True):
                member.copy_(piece.view(member.shape))

        ordered = self._ordered.finish()
        self.present = [*present, *self._ordered.present]
        return [*sums, *ordered]


@frozen
class _Span:
    """The place of a tensor in the row of its group: first element, and the one after its last."""

    index: int
    start: int
    end: int


@frozen(eq=False)
class _Group:
    """The tensors of one dtype, one after another in a row that is cut into a chunk per rank.

    Attributes:
        dtype: of the tensors.
        first_byte: where their chunk begins in each row of a message.
        chunk: elements of a chunk.
        spans: where each tensor lies.
    """

    dtype: torch.dtype
    first_byte: int
    chunk: int
    spans: tuple[_Span, ...]

    def chunks(self, message: Tensor) -> Tensor:
        """Return the chunks in a message, ``[its rows, chunk]``."""
        last_byte = self.first_byte + self.chunk * self.dtype.itemsize
        return message[:, self.first_byte : last_byte].view(self.dtype)

    def present_runs(
        self,
        rank: int,
        sent: Sequence[int],
        begun: Sequence[bool],
    ) -> Iterator[tuple[int, int, bool]]:
        """Yield stretches of the chunk of ``rank`` that a sender has, neighbours joined.

        Yields:
            First element, the one after the last, and whether the total has begun there.
        """
        first = rank * self.chunk
        run: tuple[int, int, bool] | None = None
        for span in self.spans:
            low = max(span.start - first, 0)
            high = min(span.end - first, self.chunk)
            if low >= high or not sent[span.index]:
                continue
            if run is not None and run[1:] == (low, begun[span.index]):
                run = (run[0], high, begun[span.index])
                continue
            if run is not None:
                yield run
            run = (low, high, begun[span.index])
        if run is not None:
            yield run


@frozen(eq=False)
class _Layout:
    """How a list of tensors is cut into a message.

    A message has a row per rank, with a chunk of each dtype and a mark per tensor: whether it is
    present.

    Attributes:
        outlines: the tensors, without numbers.
        groups: the tensors by dtype.
        marks: first byte of the marks.
        width: bytes of a row.
    """

    outlines: tuple[Tensor, ...]
    groups: tuple[_Group, ...]
    marks: int
    width: int

    def new_message(self, rows: int, device: torch.device) -> Tensor:
        """Return an empty message."""
        return torch.zeros(rows, self.width, dtype=torch.uint8, device=device)

    def write(self, message: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write the tensors into a message."""
        for group in self.groups:
            chunks = group.chunks(message)
            flat = [tensors[span.index].reshape(-1) for span in group.spans]
            padding = chunks.new_zeros(chunks.numel() - group.spans[-1].end)
            chunks.copy_(torch.cat([*flat, padding]).view_as(chunks))

    def read(self, message: Tensor) -> list[Tensor]:
        """Return the tensors in a message with the chunks of all ranks."""
        tensors = [torch.empty_like(each, device=message.device) for each in self.outlines]
        for group in self.groups:
            row = group.chunks(message).reshape(-1)
            for span in group.spans:
                tensor = tensors[span.index]
                flat = row[span.start : span.end]
                tensor.copy_(flat.view(tensor.shape))
        return tensors


def _layout(tensors: Sequence[Tensor], size: int) -> _Layout:
    """Return the layout of messages about ``tensors`` between ``size`` ranks."""
    groups = []
    first_byte = 0
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        spans = []
        end = 0
        for index, tensor in enumerate(tensors):
            if tensor.dtype == dtype:
                start = end
                end += tensor.numel()
                spans.append(_Span(index, start, end))
        chunk = max(1, -(-end // size))
        groups.append(_Group(dtype, first_byte, chunk, tuple(spans)))
        first_byte += _aligned(chunk * dtype.itemsize)
    outlines = tuple(torch.empty_like(tensor, device="meta") for tensor in tensors)
    width = _aligned(first_byte + len(outlines))
    return _Layout(outlines, tuple(groups), marks=first_byte, width=width)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
