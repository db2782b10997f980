"""Check tensor arguments, because kernels trust the addresses they get."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends import arguments
from arb_ternary.backends.arguments import FLOATS, check_groups
from arb_ternary.backends.protocol import WeightShape
from arb_ternary_triton.launch import INTERPRETED, cdiv, serves

#: Columns of a block of the layout, and of its bit planes.
BLOCK: Final = 128
LANES: Final = 32


def packed_columns(columns: int) -> int:
    """Return the bytes of a packed row: whole blocks of 128 trits in 32 bytes."""
    return LANES * cdiv(columns, BLOCK)


def vote_columns(columns: int, bits: int) -> int:
    """Return the elements of a row of accumulators: int8 for 8 bits, else bytes of whole blocks."""
    if bits == 8:
        return columns
    return cdiv(columns, BLOCK) * BLOCK * bits // 8


def _served(tensor: Tensor, name: str) -> torch.device:
    """Return the device of a tensor; TypeError if the kernels do not serve it."""
    if not serves(tensor):
        place = "the CPU, while TRITON_INTERPRET=1" if INTERPRETED else "a GPU"
        raise TypeError(f"{name} must be on {place}, got {tensor.device}")
    return tensor.device


def check_readable(
    tensor: Tensor, name: str, dtype: torch.dtype | tuple[torch.dtype, ...], size: tuple[int, ...]
) -> Tensor:
    """Check a tensor that is only read, and return it or a contiguous copy."""
    return arguments.check_readable(tensor, name, dtype, size, _served(tensor, name))


def check_mutable(tensor: Tensor, name: str, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """Check a tensor that is written in place."""
    arguments.check_mutable(tensor, name, dtype, size, _served(tensor, name))


def check_float(tensor: Tensor, name: str, size: tuple[int, ...]) -> Tensor:
    """Check a float tensor that is only read; float64 is rounded to float32 first.

    The interpreter computes with numpy, which has no bfloat16. There bfloat16 is widened.
    """
    if tensor.dtype is torch.float64 or (INTERPRETED and tensor.dtype is torch.bfloat16):
        tensor = tensor.to(torch.float32)
    return check_readable(tensor, name, FLOATS, size)


def check_packed(packed: Tensor, shape: WeightShape) -> Tensor:
    """Check the packed weight and return it, contiguous."""
    check_groups(shape, LANES)
    size = (shape.out_features, packed_columns(shape.in_features))
    return check_readable(packed, "packed", torch.uint8, size)
