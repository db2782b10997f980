"""Gathers over ``torch.distributed``, whose name differs between the versions of torch that are
supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor


def all_gather_single(
    gathered: Tensor, own: Tensor, *, group: dist.ProcessGroup | None, async_op: bool = False
) -> Any:
    """Fill ``gathered`` with the tensors ``own`` of all ranks, one after another; returns a handle
    if ``async_op``.
    """
    # The second name is deprecated since torch 2.13, which has the first.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(gathered, own, group=group, async_op=async_op)


def all_gather_rows(
    own: Tensor, counts: Sequence[int], *, group: dist.ProcessGroup | None
) -> list[Tensor]:
    """The rows of every rank, views of one tensor, from ``own [n, ...]`` of each; all know how many
    each has.
    """
    most = max(counts)
    padded = own.new_zeros(most, *own.shape[1:])
    padded[: own.shape[0]] = own
    found = own.new_empty(len(counts) * most, *own.shape[1:])
    all_gather_single(found, padded, group=group)
    return [found[rank * most : rank * most + count] for rank, count in enumerate(counts)]
