"""Checks of tensor arguments: what the native side takes on trust is made sure of here.

They are written for speed: a small layer takes a few microseconds, and a check of a tensor a tenth
of one.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape

#: Rows and columns of a block of a packed weight.
BLOCK: Final = 16
#: What an unsigned word of the counter hash keeps of an integer.
WORD: Final = (1 << 64) - 1
#: Float dtypes that the kernels read and write, by their native index.
DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Activations of a feed-forward part, by their native index.
ACTIVATIONS: Final = {"swiglu": 0, "relu2": 1, "reglu2": 2}


def packed_shape(rows: int, columns: int) -> tuple[int, int, int]:
    """Shape of a packed weight: strips of 16 rows, blocks of 16 columns, bytes of a block."""
    return -(-rows // BLOCK), -(-columns // BLOCK), 4 * BLOCK


def float_dtype(dtype: torch.dtype, name: str) -> int:
    """The native index of a float dtype.

    Raises:
        TypeError: the kernels do not serve it.
    """
    index = DTYPES.get(dtype)
    if index is None:
        raise TypeError(
            f"{name}: the cpu backend serves float32, bfloat16 and float16, got {dtype}"
        )
    return index


def native_eps(eps: float | None) -> float:
    """What is added to a mean square below a root, as kernels are told it; -1 where rows are not
    normalised (None).
    """
    return -1.0 if eps is None else eps


def check_gain(
    gain: Tensor | None, normed: bool, features: int, name: str = "gain"
) -> Tensor | None:
    """What rows are multiplied by after their norm, float32 and contiguous, if anything.

    Raises:
        TypeError, ValueError: as :func:`check_readable`; ValueError too where rows have no norm.
    """
    if gain is None:
        return None
    if not normed:
        raise ValueError(f"{name} needs rows that are normalised")
    return check_readable(gain, name, torch.float32, (features,))


def check_gains(
    gain: Tensor | None, grad: Tensor | None, normed: bool, features: int, name: str = "gain"
) -> tuple[Tensor | None, tuple[int, int]]:
    """The gain, and its address and that of what its gradient is added to.

    Raises:
        TypeError, ValueError: as :func:`check_gain` and :func:`check_grad_gain`.
    """
    gain = check_gain(gain, normed, features, name)
    return gain, (0 if gain is None else gain.data_ptr(), check_grad_gain(gain, grad, name))


def check_grad_gain(gain: Tensor | None, grad: Tensor | None, name: str = "gain") -> int:
    """The address of what the gradient of a checked gain is added to; 0 where there is no gain.

    Raises:
        TypeError, ValueError: as :func:`check_contiguous`; ValueError too for one without the
            other.
    """
    if (gain is None) != (grad is None):
        raise ValueError(f"{name} and grad_{name} are given together")
    if gain is None or grad is None:
        return 0
    check_contiguous(grad, f"grad_{name}", torch.float32, tuple(gain.shape))
    return grad.data_ptr()


def check_readable(tensor: Tensor, name: str, dtype: torch.dtype, size: tuple[int, ...]) -> Tensor:
    """A tensor that is only read: the same, or a contiguous copy.

    Raises:
        TypeError: not a dense tensor on the CPU of this dtype.
        ValueError: its shape is not ``size``.
    """
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor on the CPU, got {tensor.layout} on {tensor.device}"
        )
    if tensor.dtype is not dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.shape != size:
        raise ValueError(f"{name} must be {list(size)}, got {list(tensor.shape)}")
    return (
        tensor
        if tensor.is_contiguous() and not tensor.is_neg()
        else tensor.contiguous().resolve_neg()
    )


def check_contiguous(tensor: Tensor, name: str, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """A tensor that is written in place.

    Raises:
        TypeError: not a dense tensor on the CPU of this dtype.
        ValueError: its shape is not ``size``, or it is not contiguous.
    """
    if check_readable(tensor, name, dtype, size) is not tensor:
        raise ValueError(
            f"{name} is written in place and must be contiguous, got strides {tensor.stride()}"
        )


def check_shape(shape: WeightShape) -> None:
    """A weight whose groups are whole blocks.

    Raises:
        ValueError: a size is negative, or the group size is neither a multiple of 16 nor a whole
            row.
    """
    if shape.out_features < 0 or shape.in_features < 0 or shape.group_size < 0:
        raise ValueError(f"sizes of a weight must not be negative, got {shape}")
    if shape.group_size % BLOCK and shape.group_size < shape.in_features:
        raise ValueError(
            f"group_size must be a multiple of {BLOCK}, or all of a row, got {shape.group_size}"
        )


def check_packed(packed: Tensor, shape: WeightShape) -> Tensor:
    """The packed weight, contiguous."""
    return check_readable(
        packed, "packed", torch.uint8, packed_shape(shape.out_features, shape.in_features)
    )


def check_exponent(exponent: Tensor, shape: WeightShape) -> Tensor:
    """The exponents, contiguous."""
    return check_readable(exponent, "exponent", torch.int8, (shape.out_features, shape.groups))
