"""Collectives of ``torch.distributed`` whose names differ between the versions of torch that are supported."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gather_single"]


def all_gather_single(gathered: Tensor, own: Tensor, *, group: dist.ProcessGroup | None, async_op: bool = False) -> Any:
    """Fill ``gathered`` with the tensors ``own`` of all ranks, one after another; returns a handle if ``async_op``."""
    # The second name is deprecated since torch 2.13, which has the first.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(gathered, own, group=group, async_op=async_op)
