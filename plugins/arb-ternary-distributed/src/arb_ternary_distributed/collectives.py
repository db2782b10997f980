"""Gathers over ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_single(
    gathered: Tensor,
    own: Tensor,
    *,
    group: dist.ProcessGroup | None,
    async_op: bool = False,
) -> Any:
    """Fill ``gathered`` with the tensors ``own`` of all ranks, one after another.

    Returns:
        A handle if ``async_op``, or None.
    """
    # torch 2.13 introduced the first name and deprecated the second.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(gathered, own, group=group, async_op=async_op)


def all_gather_rows(
    own: Tensor,
    counts: Sequence[int],
    *,
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """Gather the rows ``own [n, ...]`` of every rank; return views of one tensor, by rank.

    Args:
        own: rows of this rank.
        counts: number of rows of each rank, which all ranks know.
        group: the ranks.
    """
    most = max(counts)
    padded = own.new_zeros(most, *own.shape[1:])
    padded[: own.shape[0]] = own
    found = own.new_empty(len(counts) * most, *own.shape[1:])
    all_gather_single(found, padded, group=group)
    return [found[rank * most : rank * most + count] for rank, count in enumerate(counts)]


def all_gather_views(
    views: Sequence[Sequence[Tensor]],
    *,
    rank: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Fill the parts of tensors that other ranks have computed.

    Args:
        views: of the tensors on this rank, by the rank that has computed that part; those of one
            dtype, with the same shapes on all ranks.
        rank: this one, which sends its part.
        group: the ranks.
    """
    own = torch.cat([view.reshape(-1) for view in views[rank]])
    sizes = [[view.numel() for view in of_rank] for of_rank in views]
    gathered = all_gather_rows(own, [sum(each) for each in sizes], group=group)
    for sender, received in enumerate(gathered):
        if sender == rank:
            continue
        pieces = torch.split(received, sizes[sender])
        for view, piece in zip(views[sender], pieces, strict=True):
            view.copy_(piece.view(view.shape))
