"""Gradients of a step in one all-reduce: less to send than in the order of places, and not the sums
of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from arb_ternary_distributed.ordered_sums import OrderedSums

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup


class OneSum:
    """As ``OrderedSums``, but for the first tensors, each of which a rank adds up itself, and all
    of them at the end.

    Args:
        world: the ranks.
        first: how many tensors; what follows is small, decides votes, and is added in the order of
            places.
    """

    def __init__(self, world: ProcessGroup, first: int) -> None:
        self._world = world
        self._first = first
        self._rest = OrderedSums(world)
        self._totals: list[Tensor | None] = [None] * first
        self._outlines: Sequence[Tensor] = ()
        self.present: list[bool] = []

    @torch.no_grad()
    def add_round(self, tensors: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Add what all ranks have for this round; where a tensor is not present, its numbers are
        not read. Collective.

        The first tensors are kept, where they are the first ones present.
        """
        self._outlines = tensors[: self._first]
        for index, tensor in enumerate(self._outlines):
            if present[index]:
                total = self._totals[index]
                self._totals[index] = tensor if total is None else total.add_(tensor)
        self._rest.add_round(tensors[self._first :], present[self._first :])

    @torch.no_grad()
    def finish(self) -> list[Tensor]:
        """The sums, on every rank; 0 where nobody had one. Collective."""
        group = self._world.group
        own = [total is not None for total in self._totals]
        marks = torch.tensor(own, dtype=torch.uint8, device=self._world.device)
        if own:
            dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=group)
        pairs = zip(self._totals, self._outlines, strict=True)
        sums = [torch.zeros_like(outline) if total is None else total for total, outline in pairs]
        there = [bool(mark) for mark in marks.tolist()]
        for dtype in dict.fromkeys(total.dtype for total in sums):
            members = [
                total
                for total, held in zip(sums, there, strict=True)
                if held and total.dtype == dtype
            ]
            if members:
                flat = torch.cat([member.reshape(-1) for member in members])
                dist.all_reduce(flat, group=group)
                for member, whole in zip(
                    members, torch.split(flat, [each.numel() for each in members]), strict=True
                ):
                    member.copy_(whole.view(member.shape))
        rest = self._rest.finish()
        self.present = [*there, *self._rest.present]
        return [*sums, *rest]
