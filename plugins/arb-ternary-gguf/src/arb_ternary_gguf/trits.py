"""A tensor of a GGUF file as trits with their scales, or as floats."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arb_ternary.errors import DataError
from arb_ternary_gguf.float_blocks import READABLE, decode_floats
from arb_ternary_gguf.reader import GgufFile, TensorInfo
from arb_ternary_gguf.tensor_types import FORK_Q2_0, Q2_0, Q4_0, TQ1_0, TQ2_0
from arb_ternary_gguf.trit_blocks import decode_codes
from arb_ternary_text.interchange.published import ScaledTrits

__all__ = ["is_ternary", "read_tensor"]

_TERNARY = (TQ1_0, TQ2_0, Q2_0, FORK_Q2_0, Q4_0)

#: Weights that are decoded at a time.
_CHUNK = 1 << 22


def is_ternary(info: TensorInfo) -> bool:
    """Whether the type of a matrix may hold trits: Q4_0 does in files of this plugin."""
    return info.type in _TERNARY and len(info.shape) == 2


def read_tensor(file: GgufFile, info: TensorInfo) -> Tensor | ScaledTrits:
    """A matrix whose blocks hold nothing but -1, 0 and 1 as trits, all else as float32.

    Scales are one for the matrix or one a row where they are equal there.

    Raises:
        DataError: the type is not read here, or a number is infinite or none.
    """
    if info.type not in READABLE:
        names = ", ".join(dict.fromkeys(kind.name for kind in READABLE))
        raise DataError(
            f"{file.path}: tensor {info.name!r} is of type {info.type.name}", f"Types that are read: {names}."
        )
    found = _read_trits(file, info) if is_ternary(info) else None
    return _read_floats(file, info) if found is None else found


def _read_trits(file: GgufFile, info: TensorInfo) -> ScaledTrits | None:
    trits = np.empty(info.shape, np.int8)
    scales = np.empty((info.shape[0], info.shape[1] // info.type.block), np.float32)
    for first, last in _chunks(info):
        values, scale = decode_codes(file.bytes_of(info, first, last), info.type)
        if values.size and (values.min() < -1 or values.max() > 1):
            return None
        trits[first:last], scales[first:last] = values, scale
    _check_finite(file, info, scales)
    _settle(trits, scales, info.type.block)
    return _coarse(torch.from_numpy(trits), torch.from_numpy(scales), info.type.block)


def _settle(trits: NDArray[np.int8], scales: NDArray[np.float32], block: int) -> None:
    """Make every scale positive, in place: a negative one turns its trits, and of 0 the trits become 0.

    The scale of such a block is then the largest of its row, so that equal scales stay equal.
    """
    blocks = trits.reshape(*scales.shape, block)
    if (scales < 0).any():
        blocks *= np.where(scales < 0, -1, 1).astype(np.int8)[..., None]
        np.abs(scales, out=scales)
    zero = scales == 0
    if zero.any():
        blocks[zero] = 0
        given = scales[~zero]
        rows = np.where(zero.all(axis=1), given[0] if given.size else np.float32(1), scales.max(axis=1))
        scales[zero] = np.broadcast_to(rows[:, None], scales.shape)[zero]


def _coarse(trits: Tensor, scales: Tensor, block: int) -> ScaledTrits:
    columns = trits.shape[1]
    if bool((scales == scales[0, 0]).all()):
        return ScaledTrits(trits, scales[0, :1].clone(), columns)
    if bool((scales == scales[:, :1]).all()):
        return ScaledTrits(trits, scales[:, :1].clone(), columns)
    while block < 256 and scales.shape[1] % 2 == 0 and bool((scales[:, ::2] == scales[:, 1::2]).all()):
        scales, block = scales[:, ::2], 2 * block
    return ScaledTrits(trits, scales.contiguous(), block)


def _read_floats(file: GgufFile, info: TensorInfo) -> Tensor:
    values = np.empty((info.rows, info.shape[-1]), np.float32)
    for first, last in _chunks(info):
        values[first:last] = decode_floats(file.bytes_of(info, first, last), info.type)
    _check_finite(file, info, values)
    return torch.from_numpy(values.reshape(info.shape))


def _chunks(info: TensorInfo) -> list[tuple[int, int]]:
    rows = max(1, _CHUNK // info.shape[-1])
    return [(first, min(first + rows, info.rows)) for first in range(0, info.rows, rows)]


def _check_finite(file: GgufFile, info: TensorInfo, values: NDArray[np.float32]) -> None:
    if not np.isfinite(values).all():
        raise DataError(f"{file.path}: tensor {info.name!r} holds numbers that are infinite or no numbers")
