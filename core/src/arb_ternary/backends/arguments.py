"""Checks of the tensor arguments of kernels, which trust the addresses that they get.

They are written for speed: a small layer takes a few microseconds, and a check of a tensor a tenth
of one.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape

#: Float dtypes that kernels read and write.
FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


def vote_dtype(shape: WeightShape) -> torch.dtype:
    """Return the dtype of stored accumulators: int8 if they have 8 bits, else bytes of several."""
    return torch.int8 if shape.vote_bits == 8 else torch.uint8


def check_readable(
    tensor: Tensor,
    name: str,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    size: tuple[int, ...],
    device: torch.device | None = None,
) -> Tensor:
    """Check a tensor that is only read, and return it or a contiguous copy.

    Args:
        tensor: the tensor.
        name: what errors call it.
        dtype: its dtype, or those that it may have.
        size: its shape.
        device: where it must be; None for the CPU.

    Raises:
        TypeError: not a dense tensor on the device, or of another dtype.
        ValueError: its shape is not ``size``.
    """
    placed = tensor.is_cpu if device is None else tensor.device == device
    if not placed or tensor.layout is not torch.strided:
        place = "the CPU" if device is None else device
        raise TypeError(
            f"{name} must be a dense tensor on {place}, got {tensor.layout} on {tensor.device}"
        )
    if tensor.dtype is not dtype and not (isinstance(dtype, tuple) and tensor.dtype in dtype):
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.shape != size:
        raise ValueError(f"{name} must be {list(size)}, got {list(tensor.shape)}")
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return tensor.contiguous().resolve_neg()


def check_mutable(
    tensor: Tensor,
    name: str,
    dtype: torch.dtype,
    size: tuple[int, ...],
    device: torch.device | None = None,
) -> None:
    """Check a tensor that is written in place.

    Raises:
        TypeError: as :func:`check_readable`.
        ValueError: as :func:`check_readable`, or it is not contiguous.
    """
    if check_readable(tensor, name, dtype, size, device) is not tensor:
        raise ValueError(
            f"{name} is written in place and must be contiguous, got strides {tensor.stride()}"
        )


def check_float(dtype: torch.dtype, name: str, backend: str) -> None:
    """Check a float dtype.

    Raises:
        TypeError: the kernels of the backend do not serve it.
    """
    if dtype not in FLOATS:
        raise TypeError(
            f"{name}: the {backend} backend serves float32, bfloat16 and float16, got {dtype}"
        )


def check_groups(shape: WeightShape, unit: int) -> None:
    """Check that the groups of a weight are whole units of the backend's layout.

    Raises:
        ValueError: a size is negative, or the group size is neither a multiple of ``unit`` nor a
            whole row.
    """
    if shape.out_features < 0 or shape.in_features < 0 or shape.group_size < 0:
        raise ValueError(f"sizes of a weight must not be negative, got {shape}")
    if shape.group_size % unit and shape.group_size < shape.in_features:
        raise ValueError(
            f"group_size must be a multiple of {unit}, or all of a row, got {shape.group_size}"
        )


def check_ids(ids: Tensor, rows: int) -> None:
    """Check that ids lie in ``0 .. rows - 1``.

    On a GPU the device stops at a bad id, as it does for torch's embedding: the host does not wait.

    Raises:
        IndexError: an id on the CPU is outside.
    """
    inside = ((ids >= 0) & (ids < rows)).all()
    if not ids.is_cpu:
        torch._assert_async(inside)
    elif not inside:
        raise IndexError(f"ids must lie in 0..{rows - 1}, got {int(ids.min())}..{int(ids.max())}")
