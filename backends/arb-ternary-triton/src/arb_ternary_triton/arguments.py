"""Checks of tensor arguments: kernels take addresses on trust."""

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
    """Bytes of a packed row: whole blocks of 128 trits in 32 bytes."""
    return LANES * cdiv(columns, BLOCK)


def vote_columns(columns: int, bits: int) -> int:
    """Elements of a row of accumulators: int8 for 8 bits, else bytes of whole blocks."""
    return columns if bits == 8 else cdiv(columns, BLOCK) * BLOCK * bits // 8


def check_readable(
    tensor: Tensor, name: str, dtype: torch.dtype | tuple[torch.dtype, ...], size: tuple[int, ...]
) -> Tensor:
    """A tensor that is only read: the same, or a contiguous copy.

    Raises:
        TypeError: not on a device that the kernels serve, or of another dtype.
        ValueError: its shape is not ``size``.
    """
    if not serves(tensor):
        place = "the CPU, while TRITON_INTERPRET=1" if INTERPRETED else "a GPU"
        raise TypeError(f"{name} must be on {place}, got {tensor.device}")
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"{name} must be {' or '.join(str(one) for one in dtypes)}, got {tensor.dtype}"
        )
    if tuple(tensor.shape) != size:
        raise ValueError(f"{name} must be {list(size)}, got {list(tensor.shape)}")
    return tensor.resolve_neg().contiguous()


def check_mutable(tensor: Tensor, name: str, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """A tensor that is written in place.

    Raises:
        TypeError: as :func:`check_readable`.
        ValueError: as :func:`check_readable`, or it is not contiguous.
    """
    if check_readable(tensor, name, dtype, size) is not tensor and not tensor.is_contiguous():
        raise ValueError(
            f"{name} is written in place and must be contiguous, got strides {tensor.stride()}"
        )


def check_float(tensor: Tensor, name: str, size: tuple[int, ...]) -> Tensor:
    """A float tensor that is only read, contiguous; float64 is rounded to float32 first.

    The interpreter computes with numpy, which has no bfloat16: there bfloat16 is widened.
    """
    widened = tensor.dtype is torch.float64 or (INTERPRETED and tensor.dtype is torch.bfloat16)
    wide = tensor.to(torch.float32) if widened else tensor
    return check_readable(wide, name, FLOATS, size)


def check_shape(shape: WeightShape) -> None:
    """A weight whose groups are whole bit planes.

    Raises:
        ValueError: the group size is neither a multiple of 32 nor a whole row.
    """
    if shape.group_size % LANES and shape.group_size < shape.in_features:
        raise ValueError(
            f"group_size must be a multiple of {LANES}, or all of a row, got {shape.group_size}"
        )


def check_packed(packed: Tensor, shape: WeightShape) -> Tensor:
    """The packed weight, contiguous."""
    check_shape(shape)
    return check_readable(
        packed, "packed", torch.uint8, (shape.out_features, packed_columns(shape.in_features))
    )
