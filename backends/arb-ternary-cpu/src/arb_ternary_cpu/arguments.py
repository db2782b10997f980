"""Checks of arguments that the native side takes on trust."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.arguments import (
    FLOATS,
    check_float,
    check_groups,
    check_mutable,
    check_readable,
)
from arb_ternary.backends.protocol import WeightShape

#: Rows and columns of a block of a packed weight.
BLOCK: Final = 16
#: What an unsigned word of the counter hash keeps of an integer.
WORD: Final = (1 << 64) - 1
#: Float dtypes that the kernels read and write, by their native index.
DTYPES: Final = {dtype: index for index, dtype in enumerate(FLOATS)}
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
    check_float(dtype, name, "cpu")
    return DTYPES[dtype]


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
        TypeError, ValueError: as :func:`check_mutable`; ValueError too for one without the
            other.
    """
    if (gain is None) != (grad is None):
        raise ValueError(f"{name} and grad_{name} are given together")
    if gain is None or grad is None:
        return 0
    check_mutable(grad, f"grad_{name}", torch.float32, tuple(gain.shape))
    return grad.data_ptr()


def check_shape(shape: WeightShape) -> None:
    """Check that the groups of a weight are whole blocks, as :func:`check_groups` does."""
    check_groups(shape, BLOCK)


def check_packed(packed: Tensor, shape: WeightShape) -> Tensor:
    """The packed weight, contiguous."""
    return check_readable(
        packed, "packed", torch.uint8, packed_shape(shape.out_features, shape.in_features)
    )


def check_exponent(exponent: Tensor, shape: WeightShape) -> Tensor:
    """The exponents, contiguous."""
    return check_readable(exponent, "exponent", torch.int8, (shape.out_features, shape.groups))
