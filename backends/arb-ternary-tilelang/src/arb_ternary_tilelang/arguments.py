"""Checks of tensor arguments; the kernels themselves check nothing."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends import arguments
from arb_ternary.backends.arguments import check_float
from arb_ternary_tilelang.lane import Lane

#: Columns of a 32-bit word of trits.
UNIT: Final = 16
#: Float dtypes that the kernels read and write, by the name that TileLang gives them.
FLOATS: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def require(condition: bool, message: str) -> None:
    """Raise a ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def packed_bytes(columns: int) -> int:
    """Bytes of a packed row: whole words of 16 columns."""
    return 4 * -(-columns // UNIT)


def served(lane: Lane, tensor: Tensor, name: str) -> Tensor:
    """Return a float tensor in a dtype that the lane's kernels read.

    Raises:
        TypeError: the kernels do not serve its dtype.
    """
    check_float(tensor.dtype, name, "tilelang")
    return tensor if lane.cuda else tensor.to(torch.float32)


def readable(
    tensor: Tensor,
    name: str,
    dtype: torch.dtype,
    size: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """Check a tensor that is only read, and return it or a contiguous copy, without its graph."""
    checked = arguments.check_readable(tensor, name, dtype, size, device)
    return checked.detach() if checked.requires_grad else checked


def writable(
    tensor: Tensor,
    name: str,
    dtype: torch.dtype,
    size: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """Check a tensor that a kernel changes in place, and increment its version counter."""
    arguments.check_mutable(tensor, name, dtype, size, device)
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
    return tensor


@cache
def nothing(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """An empty vector: what a kernel takes where an argument is not given."""
    return torch.empty(0, dtype=dtype, device=device)


def words(packed: Tensor) -> Tensor:
    """View bytes of rows of whole words as int32, without a copy."""
    return packed.view(torch.int32)
