"""Check tensor arguments, because kernels trust the addresses they get."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape
from arb_ternary_triton.launch import INTERPRETED, cdiv, serves

#: Columns of a block of the layout, and of its bit planes.
BLOCK: Final = 128
LANES: Final = 32
#: Dtypes that the kernels read and write as floats.
FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


def packed_columns(columns: int) -> int:
    """Return the bytes of a packed row: whole blocks of 128 trits in 32 bytes."""
    return LANES * cdiv(columns, BLOCK)


def vote_columns(columns: int, bits: int) -> int:
    """Return the elements of a row of accumulators: int8 for 8 bits, else bytes of whole blocks."""
    if bits == 8:
        return columns
    return cdiv(columns, BLOCK) * BLOCK * bits // 8


def check_readable(
    tensor: Tensor, name: str, dtype: torch.dtype | tuple[torch.dtype, ...], size: tuple[int, ...]
) -> Tensor:
    """Check a tensor that is only read, and return it or a contiguous copy.

    Raises:
        TypeError: it is on a device that the kernels do not serve, or has another dtype.
        ValueError: its shape is not ``size``.
    """
    if not serves(tensor):
        place = "the CPU, while TRITON_INTERPRET=1" if INTERPRETED else "a GPU"
        raise TypeError(f"{name} must be on {place}, got {tensor.device}")
    if tensor.dtype is not dtype and not (isinstance(dtype, tuple) and tensor.dtype in dtype):
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        names = " or ".join(map(str, dtypes))
        raise TypeError(f"{name} must be {names}, got {tensor.dtype}")
    if tensor.shape != size:
        raise ValueError(f"{name} must be {list(size)}, got {list(tensor.shape)}")
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return tensor.resolve_neg().contiguous()


def check_mutable(tensor: Tensor, name: str, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """Check a tensor that is written in place.

    Raises:
        TypeError: as :func:`check_readable`.
        ValueError: as :func:`check_readable`, or it is not contiguous.
    """
    checked = check_readable(tensor, name, dtype, size)
    if checked is not tensor and not tensor.is_contiguous():
        raise ValueError(
            f"{name} is written in place and must be contiguous, got strides {tensor.stride()}"
        )


def check_float(tensor: Tensor, name: str, size: tuple[int, ...]) -> Tensor:
    """Check a float tensor that is only read; float64 is rounded to float32 first.

    The interpreter computes with numpy, which has no bfloat16. There bfloat16 is widened.
    """
    if tensor.dtype is torch.float64 or (INTERPRETED and tensor.dtype is torch.bfloat16):
        tensor = tensor.to(torch.float32)
    return check_readable(tensor, name, FLOATS, size)


def check_shape(shape: WeightShape) -> None:
    """Check that the groups of a weight are whole bit planes.

    Raises:
        ValueError: the group size is neither a multiple of 32 nor a whole row.
    """
    if shape.group_size % LANES and shape.group_size < shape.in_features:
        raise ValueError(
            f"group_size must be a multiple of {LANES}, or all of a row, got {shape.group_size}"
        )


def check_packed(packed: Tensor, shape: WeightShape) -> Tensor:
    """Check the packed weight and return it, contiguous."""
    check_shape(shape)
    size = (shape.out_features, packed_columns(shape.in_features))
    return check_readable(packed, "packed", torch.uint8, size)
