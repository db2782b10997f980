"""Checks of tensor arguments; the kernels themselves check nothing."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape
from arb_ternary.counters.hashing import hash_key, signed

#: Columns of a 32-bit word of trits.
UNIT: Final = 16
#: Float dtypes that the kernels read and write, by the name that TileLang gives them.
FLOATS: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
#: Elements whose hashes the kernels serve: the high half of an index is 0 or 1.
_MOST: Final = 1 << 33


def require(condition: bool, message: str) -> None:
    """Raise a ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check_ids(ids: Tensor, rows: int) -> None:
    """Check that ids are in ``0 .. rows - 1``.

    On a GPU the device stops at a bad id, as it does for torch's embedding: the host does not wait.

    Raises:
        IndexError: an id on the CPU is outside.
    """
    inside = ((ids >= 0) & (ids < rows)).all()
    if ids.device.type != "cpu":
        torch._assert_async(inside)
    elif not inside:
        raise IndexError(f"ids must be in 0..{rows - 1}, got {int(ids.min())}..{int(ids.max())}")


def packed_bytes(columns: int) -> int:
    """Bytes of a packed row: whole words of 16 columns."""
    return 4 * -(-columns // UNIT)


def float_name(dtype: torch.dtype, name: str) -> str:
    """Return TileLang's name of a float dtype.

    Raises:
        TypeError: the kernels do not serve it.
    """
    found = FLOATS.get(dtype)
    if found is None:
        raise TypeError(
            f"{name}: the tilelang backend serves float32, bfloat16 and float16, got {dtype}"
        )
    return found


def readable(
    tensor: Tensor,
    name: str,
    dtype: torch.dtype,
    size: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """Check a tensor that is only read, and return it or a contiguous copy.

    Raises:
        TypeError: another dtype, device or layout.
        ValueError: its shape is not ``size``.
    """
    if tensor.device != device or tensor.layout is not torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor on {device}, got {tensor.layout} on {tensor.device}"
        )
    if tensor.dtype is not dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.shape != size:
        raise ValueError(f"{name} must be {list(size)}, got {list(tensor.shape)}")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return tensor.contiguous().resolve_neg()


def writable(
    tensor: Tensor,
    name: str,
    dtype: torch.dtype,
    size: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """Check a tensor that a kernel changes in place, and increment its version counter.

    Raises:
        TypeError: another dtype, device or layout.
        ValueError: its shape is not ``size``, or it is not contiguous.
    """
    if not tensor.is_contiguous() or tensor.is_neg():
        raise ValueError(
            f"{name} is written in place and must be contiguous, got strides {tensor.stride()}"
        )
    found = readable(tensor, name, dtype, size, device)
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
    return found


def check_shape(shape: WeightShape) -> None:
    """Check that the groups of a weight are whole words.

    Raises:
        ValueError: the group size is neither a multiple of 16 nor a whole row.
    """
    if shape.group_size % UNIT and shape.group_size < shape.in_features:
        raise ValueError(
            f"group_size must be a multiple of {UNIT}, or all of a row, got {shape.group_size}"
        )


@cache
def nothing(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """An empty vector: what a kernel takes where an argument is not given."""
    return torch.empty(0, dtype=dtype, device=device)


def words(packed: Tensor) -> Tensor:
    """View bytes of rows of whole words as int32, without a copy."""
    return packed.view(torch.int32)


def keys(seed: int, step: int, stream: int, count: int) -> tuple[int, int]:
    """Return the hash's keys of indices below and above 2**32, as signed 32-bit numbers.

    Raises:
        ValueError: there are more than 2**33 elements.
    """
    require(
        count <= _MOST,
        f"the tilelang backend draws for at most 2**33 elements of a tensor, got {count}",
    )
    low = hash_key(seed, step, stream)
    high = hash_key(seed, step, stream, 1)
    return signed(low), signed(high)
