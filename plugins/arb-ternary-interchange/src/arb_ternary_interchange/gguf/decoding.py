"""Read a tensor of a GGUF file as trits with their scales, or as floats."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arb_ternary.errors import DataError
from arb_ternary_interchange.decoder.published import ScaledTrits
from arb_ternary_interchange.decoder.scales import merged_scales
from arb_ternary_interchange.gguf.blocks import chunks, decode_codes, decode_floats, row_chunks
from arb_ternary_interchange.gguf.reader import GgufFile, TensorInfo
from arb_ternary_interchange.gguf.tensor_types import FORK_Q2_0, READABLE_TYPES, TERNARY_TYPES

#: The option ``group_size`` of the decoder.
GroupSize = int | Literal["row", "tensor"]

_MAY_HOLD_TRITS: Final = (*TERNARY_TYPES, FORK_Q2_0)


def is_ternary(info: TensorInfo) -> bool:
    """Whether the type of a matrix may hold trits. Q4_0 does in files of this program."""
    return info.type in _MAY_HOLD_TRITS and len(info.shape) == 2


def read_tensor(
    file: GgufFile, info: TensorInfo, group_size: GroupSize | None = None
) -> Tensor | ScaledTrits:
    """Read a matrix whose blocks hold only -1, 0 and 1 as trits, and everything else as float32.

    There is one scale for the matrix, or one per row, if they are equal there.

    Args:
        file: the file.
        info: one of its tensors.
        group_size: columns of other groups of trits; None = the most, up to 256, that have equal
            scales.

    Raises:
        DataError: the type is not read here, a number is infinite or NaN, or there are more scales
            than groups.
    """
    if info.type not in READABLE_TYPES:
        names = ", ".join(dict.fromkeys(kind.name for kind in READABLE_TYPES))
        raise DataError(
            f"{file.path}: tensor {info.name!r} is of type {info.type.name}",
            f"Types that are read: {names}.",
        )
    found = _read_trits(file, info, group_size) if is_ternary(info) else None
    return _read_floats(file, info) if found is None else found


def _read_trits(
    file: GgufFile, info: TensorInfo, group_size: GroupSize | None
) -> ScaledTrits | None:
    """Read trits; None if the matrix holds other numbers."""
    rows, columns = info.shape
    trits = np.empty(info.shape, np.int8)
    stored = np.empty((rows, columns // info.type.block), np.float32)
    for some in row_chunks(rows, columns):
        values, scale = decode_codes(file.bytes_of(info, some.start, some.stop), info.type)
        if values.size and (values.min() < -1 or values.max() > 1):
            return None
        trits[some] = values
        stored[some] = scale
    _check_finite(file, info, stored)
    sizes: tuple[int, ...] = (256, 128, 64)
    if group_size is not None:
        sizes = (group_size,) if isinstance(group_size, int) else ()
    scales, held = merged_scales(torch.from_numpy(stored), info.type.block, columns, sizes)
    if not _fits(scales, held, group_size):
        raise DataError(
            f"{file.path}: tensor {info.name!r} has more scales than its groups ({group_size})"
        )
    return ScaledTrits(torch.from_numpy(trits), scales, held)


def _fits(scales: Tensor, held: int, group_size: GroupSize | None) -> bool:
    """Whether there is no more than one scale per group. Blocks finer than groups have been
    merged.
    """
    if group_size is None or scales.numel() == 1:
        return True
    if group_size == "tensor":
        return False
    return scales.shape[1] == 1 or (group_size != "row" and held % group_size == 0)


def _read_floats(file: GgufFile, info: TensorInfo) -> Tensor:
    values = np.empty((info.rows, info.shape[-1]), np.float32)
    for some in row_chunks(*values.shape):
        values[some] = decode_floats(file.bytes_of(info, some.start, some.stop), info.type)
    _check_finite(file, info, values)
    return torch.from_numpy(values.reshape(info.shape))


def _check_finite(file: GgufFile, info: TensorInfo, values: NDArray[np.float32]) -> None:
    if not all(np.isfinite(part).all() for part in chunks(values)):
        raise DataError(f"{file.path}: tensor {info.name!r} holds numbers that are infinite or NaN")
