"""Checks of tensor arguments; the kernels themselves check nothing."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends import arguments

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


def float_name(dtype: torch.dtype, name: str) -> str:
    """Return TileLang's name of a float dtype.

    Raises:
        TypeError: the kernels do not serve it.
    """
    arguments.check_float(dtype, name, "tilelang")
    return FLOATS[dtype]


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
