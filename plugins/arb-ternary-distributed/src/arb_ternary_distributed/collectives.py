"""Gathers over ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
